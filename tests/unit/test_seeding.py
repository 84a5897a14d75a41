"""Random state survives a checkpoint as tensors of fixed shapes."""

from __future__ import annotations

import random

import torch

from dmuon_titan.seeding import random_state, restore_random_state, seed_everything

CPU = torch.device("cpu")


def draw() -> tuple[list[float], float, float]:
    return torch.rand(3).tolist(), random.random(), random.gauss(0, 1)


def test_what_was_drawn_after_saving_is_drawn_again():
    seed_everything(3)
    random.gauss(0, 1)  # leaves the second of a pair for the next call
    saved = random_state(CPU)
    first = draw()
    assert draw() != first
    restore_random_state(saved, CPU)
    assert draw() == first


def test_shapes_do_not_depend_on_the_state():
    seed_everything(3)
    before = {name: tensor.shape for name, tensor in random_state(CPU).items()}
    random.gauss(0, 1)
    torch.randn(5)
    assert {name: tensor.shape for name, tensor in random_state(CPU).items()} == before
