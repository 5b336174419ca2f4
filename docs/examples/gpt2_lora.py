"""Fine-tune a causal language model of Hugging Face with LoRA, here on sums such as ``12+34=46``.

python -m orchestrator.launch strategy=ddp job._target_=gpt2_lora.LoRA job.pretrained=gpt2
"""

from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from orchestrator import Job

IGNORED = -100  # the label of what the loss leaves out


@dataclass(frozen=True, kw_only=True)
class LoRA(Job):
    """``pretrained`` is a model of the hub or a folder; None: a tiny GPT-2 with random weights and bytes as tokens."""

    pretrained: str | None = None
    rank: int = 8
    length: int = 12  # tokens in a sample, with padding
    lr: float = 3e-3

    def model(self):
        if self.pretrained is not None:
            model = AutoModelForCausalLM.from_pretrained(self.pretrained)
        else:
            model = GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=256,
                    n_positions=64,
                    n_embd=64,
                    n_layer=4,
                    n_head=4,
                    initializer_range=0.2,  # embeddings stay as they are, so they have to differ
                    bos_token_id=0,
                    eos_token_id=0,
                    embd_pdrop=0,
                    attn_pdrop=0,
                    resid_pdrop=0,
                )
            )
        is_gpt2 = model.config.model_type == "gpt2"  # whose linear layers hold their weights transposed
        adapters = LoraConfig(r=self.rank, target_modules="all-linear", fan_in_fan_out=is_gpt2)
        return Logits(get_peft_model(model, adapters)).train()  # from_pretrained returns a model in eval mode

    def dataset(self, split):
        numbers = torch.randint(100, (1000 if split == "train" else 200, 2), generator=seeded(split)).tolist()
        tokens = self.tokens()
        return [self.item(tokens(f"{a}+{b}="), tokens(f"{a + b}\n")) for a, b in numbers]

    def item(self, prompt, answer):
        """Return the tokens of a sample, padded to one length. The loss counts the tokens of the answer only."""
        padding = self.length - len(prompt) - len(answer)
        return {
            "input_ids": torch.tensor(prompt + answer + [0] * padding),
            "attention_mask": torch.tensor([1] * (self.length - padding) + [0] * padding),
            "labels": torch.tensor([IGNORED] * len(prompt) + answer + [IGNORED] * padding),
        }

    def tokens(self):
        """Return the function from a text to its tokens."""
        if self.pretrained is None:
            return lambda text: list(text.encode())
        tokenizer = AutoTokenizer.from_pretrained(self.pretrained)
        return lambda text: tokenizer(text).input_ids

    def loss(self, output, target):
        return F.cross_entropy(output[:, :-1].flatten(0, 1), target["labels"][:, 1:].flatten(), ignore_index=IGNORED)

    def weight(self, target):
        return (target["labels"][:, 1:] != IGNORED).sum()

    def metrics(self, output, target):
        return {"accuracy": (output[:, :-1].argmax(dim=-1) == target["labels"][:, 1:]).sum()}

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=self.lr)


class Logits(nn.Module):
    """Calls the model with the tensors of a batch, and returns its logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits


def seeded(split):
    return torch.Generator().manual_seed(0 if split == "train" else 1)
