"""Data-parallel training of a small network: gradients are averaged while others are computed.

    mpirun -n 4 python benchmarks/examples/train.py [--gpu]

Each rank takes its share of every batch. The backward pass gives the gradients of the last layer
first; each goes to the GradientBucketer as soon as it is there, whose buckets are reduced behind
the rest of the pass. The losses are compared with those of one rank that takes whole batches: they
differ by rounding alone, since sums have another order (1e-10 of the loss, in float64).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from common import run

from rdmakit import Communicator, GradientBucketer

LAYERS = (20, 64, 64, 48, 1)
SHARE = 32
"""Samples that a rank takes of a batch."""
STEPS = 60
RATE = 0.05
TOLERANCE = 1e-10


def data(xp: Any, samples: int) -> tuple[Any, Any]:
    """Return inputs and what should come out of them."""
    x = np.random.default_rng(7).normal(size=(samples, LAYERS[0]))
    y = np.tanh(x[:, :1] * x[:, 1:2] + np.sin(x[:, 2:3])) + 0.1 * x[:, 3:4]
    return xp.asarray(x), xp.asarray(y)


def network(xp: Any) -> list[Any]:
    """Return weights and biases, layer by layer; the same on every rank."""
    rng = np.random.default_rng(3)
    made = []
    for wide, next_ in pairwise(LAYERS):
        made += [xp.asarray(rng.normal(size=(wide, next_)) / wide**0.5), xp.zeros(next_)]
    return made


def backward(xp: Any, p: list[Any], x: Any, y: Any, done: Callable[[int, Any], object]) -> float:
    """Return the loss; give each gradient to ``done`` with its place, the last layer's first."""
    values = [x]
    for layer in range(0, len(p), 2):
        z = values[-1] @ p[layer] + p[layer + 1]
        values.append(xp.tanh(z) if layer + 2 < len(p) else z)
    error = values[-1] - y
    loss = float((error**2).mean())
    slope = 2 * error / error.size
    for layer in range(len(p) - 2, -1, -2):
        inputs = values[layer // 2]
        done(layer + 1, slope.sum(axis=0))
        done(layer, inputs.T @ slope)
        if layer:
            slope = (slope @ p[layer].T) * (1 - inputs**2)
    return loss


def descend(p: list[Any], gradients: list[Any]) -> None:
    """Change the parameters."""
    for value, gradient in zip(p, gradients, strict=True):
        value -= RATE * gradient


def train(comm: Communicator, xp: Any) -> list[float]:
    """Return the mean loss of each step, trained by all ranks."""
    x, y = data(xp, SHARE * comm.size)
    mine = slice(SHARE * comm.rank, SHARE * (comm.rank + 1))
    p = network(xp)
    gradients = [xp.empty_like(value) for value in p]
    order = range(len(p) - 1, -1, -1)  # as they become ready
    bucketer = GradientBucketer(comm, [gradients[i] for i in order], bucket_bytes=32 << 10)

    def done(place: int, gradient: Any) -> None:
        gradients[place] = gradient
        bucketer.ready(len(p) - 1 - place, gradient)

    losses = xp.empty(STEPS)
    for step in range(STEPS):
        losses[step] = backward(xp, p, x[mine], y[mine], done)
        bucketer.wait()
        descend(p, gradients)
    comm.Allreduce(losses, losses, "avg")
    return [float(loss) for loss in losses]


def train_alone(xp: Any, samples: int) -> list[float]:
    """Return the loss of each step, trained by this rank on whole batches."""
    x, y = data(xp, samples)
    p = network(xp)
    gradients = [xp.empty_like(value) for value in p]
    return [
        (backward(xp, p, x, y, gradients.__setitem__), descend(p, gradients))[0]
        for _ in range(STEPS)
    ]


def main(comm: Communicator, xp: Any) -> tuple[bool, str]:
    """Train both ways and compare the losses."""
    together = train(comm, xp)
    alone = train_alone(xp, SHARE * comm.size)
    worst = max(abs(a - b) / b for a, b in zip(together, alone, strict=True))
    text = (
        f"training, {STEPS} steps of {SHARE * comm.size} samples, loss {together[0]:.4f} -> "
        f"{together[-1]:.4f}, difference from one rank's losses {worst:.1e}"
    )
    return worst < TOLERANCE and together[-1] < 0.7 * together[0], text


if __name__ == "__main__":
    run(str(__doc__), main)
