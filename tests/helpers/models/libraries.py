"""Models of timm, torchvision, diffusers and peft, as their constructors make them with small arguments."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.models.tasks import CLASSES, Exhibit, NextToken, Numbers, Reconstruction, TextClasses
from helpers.models.zoo import bert, gpt2, llama, qwen

IMAGES, SMALL_IMAGES = Numbers((3, 64, 64)), Numbers((3, 32, 32))
LR = 0.01
"""Convolutions without normalization double the rounding of a larger step."""


def _timm(name: str, **options: Any) -> Exhibit:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=CLASSES, **options)
        for module in model.modules():
            if isinstance(module, nn.Dropout):  # not all of them have an argument
                module.p = 0.0
        return model

    size = options.get("img_size", 64)
    return Exhibit(title=name, package="timm", build=build, task=Numbers((3, size, size)), lr=LR)


TINY_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
TIMM: dict[str, dict[str, Any]] = {
    **{f"test_{name}": {} for name in ("byobnet", "convnext", "convnext2", "convnext3", "mambaout", "nfnet", "resnet")},
    **{f"test_efficientnet{name}": {} for name in ("", "_evos", "_gn", "_ln")},
    **{f"test_vit{name}": {"img_size": 32} for name in ("", "2", "3", "4", "_relpos")},
    **{f"test_{name}": {"img_size": 64} for name in ("coatnet", "maxvit")},
    "vit_tiny_patch16_224": TINY_VIT,
    "deit_tiny_distilled_patch16_224": TINY_VIT,
    "beit_base_patch16_224": TINY_VIT,
    "eva02_tiny_patch14_224": {**TINY_VIT, "embed_dim": 48},
    "cait_xxs24_224": TINY_VIT,
    "xcit_nano_12_p8_224": {**TINY_VIT, "patch_size": 8},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2),
    },
    "pvt_v2_b0": {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16), "num_heads": (1, 1, 2, 2)},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
    "resnetv2_50": {"layers": (1, 1), "channels": (16, 32)},
    "mobilenetv3_small_050": {},
    "lcnet_050": {},
    "tinynet_e": {},
}  # fmt: skip


def _vision(title: str, make: str, task: Numbers = IMAGES, **options: Any) -> Exhibit:
    """A model of torchvision; ``make``: its constructor in ``torchvision.models``."""

    def build() -> nn.Module:
        module, _, function = f"torchvision.models.{make}".rpartition(".")
        return getattr(importlib.import_module(module), function)(num_classes=CLASSES, **options)

    return Exhibit(title=title, package="torchvision", build=build, task=task, lr=LR)


def _resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES, norm_layer=lambda width: nn.GroupNorm(8, width))
    return model.train()


PATCHES = {"dropout": 0.0, "attention_dropout": 0.0}
VISION = {
    "alexnet": _vision("AlexNet", "alexnet", dropout=0.0),
    "squeezenet": _vision("SqueezeNet 1.1", "squeezenet1_1", dropout=0.0),
    "shufflenet": _vision("ShuffleNet v2", "shufflenet_v2_x0_5", SMALL_IMAGES),
    "mobilenet_v2": _vision("MobileNet v2", "mobilenet_v2", SMALL_IMAGES, width_mult=0.25, dropout=0.0),
    "mobilenet_v3": _vision("MobileNet v3", "mobilenet_v3_small", SMALL_IMAGES, width_mult=0.25, dropout=0.0),
    "densenet": _vision(
        "DenseNet", "densenet.DenseNet", SMALL_IMAGES, growth_rate=4, block_config=(2, 2), num_init_features=8
    ),
    "vit": _vision(
        "Vision transformer", "vision_transformer.VisionTransformer", SMALL_IMAGES, image_size=32, patch_size=8,
        num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=32, **PATCHES,
    ),
    "swin": _vision(
        "Swin", "swin_transformer.SwinTransformer", SMALL_IMAGES, patch_size=[4, 4], embed_dim=16, depths=[1, 1],
        num_heads=[2, 2], window_size=[4, 4], stochastic_depth_prob=0.0, **PATCHES,
    ),
    "resnet_gn": Exhibit(
        title="ResNet with GroupNorm", package="torchvision", build=_resnet, task=SMALL_IMAGES, lr=LR
    ),
    "resnet18": _vision("ResNet-18", "resnet18", SMALL_IMAGES),
}  # fmt: skip


def _peft(kind: str, base: Callable[[], nn.Module], *modules: str, **options: Any) -> Callable[[], nn.Module]:
    """``base`` with adapters at ``modules``."""

    def build() -> nn.Module:
        import peft

        torch.manual_seed(0)
        given: dict[str, Any] = {"target_modules": [*modules]} if modules else {}
        return peft.get_peft_model(base(), getattr(peft, f"{kind}Config")(**given, **options))

    return build


def _in_bfloat16() -> nn.Module:
    """Adapters in float32 on a base in bfloat16, as peft makes them for quantized bases."""
    return _peft("Lora", lambda: llama().to(torch.bfloat16), "q_proj", "v_proj", r=2)()


ADAPTERS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "dora": ("DoRA", _peft("Lora", llama, "q_proj", "v_proj", r=2, use_dora=True)),
    "rslora_all": ("rsLoRA of all layers", _peft("Lora", llama, target_modules="all-linear", r=2, use_rslora=True)),
    "lora_bias": ("LoRA with biases", _peft("Lora", qwen, "q_proj", r=2, bias="all")),
    "lora_tied": ("LoRA of a tied table", _peft("Lora", gpt2, "wte", r=2)),
    "adalora": ("AdaLoRA", _peft("AdaLora", llama, "q_proj", "v_proj", init_r=3, target_r=2, total_step=100)),
    "loha": ("LoHa", _peft("LoHa", llama, "q_proj", "v_proj", r=2)),
    "lokr": ("LoKr", _peft("LoKr", llama, "q_proj", "v_proj", r=2)),
    "oft": ("OFT", _peft("OFT", llama, "q_proj", "v_proj", oft_block_size=4, r=0)),
    "boft": ("BOFT", _peft("BOFT", llama, "q_proj", "v_proj", boft_block_size=4)),
    "hra": ("HRA", _peft("HRA", llama, "q_proj", "v_proj", r=2)),
    "vera": ("VeRA", _peft("Vera", llama, "q_proj", "o_proj", r=2)),
    "fourier": ("FourierFT", _peft("FourierFT", llama, "q_proj", "v_proj", n_frequency=8)),
    "ln_tuning": ("LayerNorm tuning", _peft("LNTuning", llama, "norm")),
    "miss": ("MiSS", _peft("Miss", llama, "q_proj", "v_proj", r=2)),
    "ia3": (
        "IA3",
        _peft("IA3", llama, "k_proj", "v_proj", "down_proj", feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    ),
    "prefix": ("Prefix tuning", _peft("PrefixTuning", llama, num_virtual_tokens=2, task_type="CAUSAL_LM")),
    "trainable_tokens": ("Trainable tokens", _peft("TrainableTokens", llama, "embed_tokens", token_indices=[3, 4])),
    "lora_bfloat16": ("LoRA on a base in bfloat16", _in_bfloat16),
}


def _diffusion(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, name)(**options)

    return build


LATENT = (4, 8, 8)
UP, DOWN = {"up_block_types": ("UpDecoderBlock2D",) * 2}, {"down_block_types": ("DownEncoderBlock2D",) * 2}
NARROW: dict[str, Any] = {"block_out_channels": (8, 16), "norm_num_groups": 4}
DIFFUSION: dict[str, tuple[Callable[[], nn.Module], Reconstruction]] = {
    "VQModel": (
        _diffusion("VQModel", in_channels=1, out_channels=1, latent_channels=2, num_vq_embeddings=16, **NARROW, **UP,
                   **DOWN),
        Reconstruction("sample", (1, 8, 8)),
    ),
    "AutoencoderTiny": (
        _diffusion(
            "AutoencoderTiny", in_channels=1, out_channels=1, encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1), latent_channels=2,
        ),
        Reconstruction("sample", (1, 8, 8)),
    ),
    "Transformer2DModel": (
        _diffusion(
            "Transformer2DModel", num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2,
            norm_num_groups=2,
        ),
        Reconstruction("hidden_states", LATENT),
    ),
}  # fmt: skip

LIBRARIES: dict[str, Exhibit] = {
    **{f"peft/{name}": Exhibit(title=title, package="peft", build=build, task=NextToken(), coarse="bfloat16" in name)
       for name, (title, build) in ADAPTERS.items()},
    "peft/lora_bert": Exhibit(
        title="BERT with LoRA", package="peft", task=TextClasses(),
        build=_peft("Lora", bert, "query", "value", r=2, task_type="SEQ_CLS"),
    ),
    **{f"diffusers/{name}": Exhibit(title=name, package="diffusers", build=build, task=task)
       for name, (build, task) in DIFFUSION.items()},
    **{f"timm/{name}": _timm(name, **options) for name, options in TIMM.items()},
    **{f"torchvision/{name}": exhibit for name, exhibit in VISION.items()},
}  # fmt: skip
