"""The Trainer of Hugging Face transformers, with a model small enough for a test."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
tokens = torch.arange(64 * 16).reshape(64, 16) % 32
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        output_dir=folder, max_steps=5, per_device_train_batch_size=4, logging_steps=1, report_to="none", use_cpu=True
    )
    trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=[{"input_ids": t, "labels": t} for t in tokens])
    result = trainer.train()
if trainer.is_world_process_zero():
    print(f"{args.world_size} processes: {result.global_step} steps, {trainer.accelerator.distributed_type}")
torch.distributed.destroy_process_group()  # otherwise gloo may abort the process at its end
