"""A LightningModule that the Trainer of Lightning fits."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return torch.nn.functional.cross_entropy(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


data = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,))), batch_size=8)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False
)
trainer.fit(Net(), data)
if trainer.is_global_zero:
    print(f"{trainer.world_size} processes: {trainer.global_step} steps")
