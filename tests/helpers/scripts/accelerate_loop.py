"""The quick start of Hugging Face Accelerate."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,))), batch_size=8)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for inputs, targets in data:
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
losses = accelerator.gather(loss.detach().reshape(1))
accelerator.print(f"{accelerator.num_processes} processes: {len(data)} batches each, {len(losses)} losses")
accelerator.end_training()
