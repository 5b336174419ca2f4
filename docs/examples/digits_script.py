"""Classify handwritten digits: an ordinary training script, before it becomes a job.

python digits_script.py --epochs 10
"""

import argparse
import csv
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def build_model(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 10),
    )


def build_dataset(split):
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    chosen = slice(0, 1500) if split == "train" else slice(1500, None)
    return TensorDataset(images[chosen], torch.tensor(data.target)[chosen])


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=60)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    order = torch.Generator().manual_seed(args.seed)
    train_loader = DataLoader(build_dataset("train"), args.batch_size, shuffle=True, generator=order)
    val_loader = DataLoader(build_dataset("val"), 256)
    model = build_model(args.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train_loader))

    checkpoint, first_epoch = Path("checkpoint.pt"), 0
    if args.resume and checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        order.set_state(state["order"])
        first_epoch = state["epoch"]

    step = first_epoch * len(train_loader)
    with Path("losses.csv").open("a" if first_epoch else "w") as file:
        log = csv.writer(file)
        for epoch in range(first_epoch, args.epochs):
            model.train()
            for images, labels in train_loader:
                images, labels = images.to(device), labels.to(device)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
                optimizer.step()
                scheduler.step()
                step += 1
                log.writerow(["train", step, loss.item()])

            model.eval()
            loss_sum = correct = total = 0
            with torch.no_grad():
                for images, labels in val_loader:
                    images, labels = images.to(device), labels.to(device)
                    output = model(images)
                    loss_sum += F.cross_entropy(output, labels).item() * len(labels)
                    correct += (output.argmax(dim=-1) == labels).sum().item()
                    total += len(labels)
            log.writerow(["val", step, loss_sum / total])
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}, val_loss {loss_sum / total:.4f}, {correct / total:.2%}")
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "order": order.get_state(),
                    "epoch": epoch + 1,
                },
                checkpoint,
            )


if __name__ == "__main__":
    main()
