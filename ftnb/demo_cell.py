"""The cell of the demo and of the quickstart notebook: handwritten digits and a small network."""

from __future__ import annotations

SOURCE = """\
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

digits = load_digits()                        # 1,797 images of 8 x 8 pixels
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
dataset = TensorDataset(images[:1500], labels[:1500])

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()


def evaluate(model):
    right = model(images[1500:]).argmax(1) == labels[1500:]
    return {"accuracy": right.float().mean().item()}
"""
