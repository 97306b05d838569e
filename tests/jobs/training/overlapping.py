"""A job with a backward pass that waits, on every rank, until the last layer's gradient is being sent to
the others.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

DATA = torch.arange(2048, dtype=torch.float32).view(16, 128) / 2048
WIDTH = 512
PATIENCE_S = 60.0
_BYTES_SENT_AT = 200  # offset of tcpi_bytes_sent in struct tcp_info of <linux/tcp.h>


def sent_bytes() -> int:
    """Return the bytes that this process has sent over its open TCP connections, by the kernel's
    count.
    """
    return sum(_sent(int(name)) for name in os.listdir("/proc/self/fd"))


def _sent(descriptor: int) -> int:
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.type != socket.SOCK_STREAM or connection.family == socket.AF_UNIX:
                return 0
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT_AT + 8)
    except OSError:  # closed meanwhile
        return 0
    return int(struct.unpack_from("Q", info, _BYTES_SENT_AT)[0])


class _Between(torch.autograd.Function):
    """A function that calls ``act`` in the backward pass, when the gradients of all later layers
    are there.
    """

    @staticmethod
    def forward(context: Any, batch: Tensor, act: Callable[[], None]) -> Tensor:
        context.act = act
        return batch.view_as(batch)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        context.act()
        return gradients[0], None


def train(trainer: Any, *, steps: int, at_steps: list[int]) -> None:
    """Train a model of two large layers.

    Args:
        at_steps: steps with a backward pass in which each rank waits until it has sent half of the
            last layer's gradient.
    """
    torch.manual_seed(trainer.seed)
    first, last = nn.Linear(128, WIDTH), nn.Linear(WIDTH, WIDTH)
    model = nn.ModuleList([first, last])
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    while trainer.step < steps:
        before = sent_bytes()
        target_bytes = before + last.weight.numel() * last.weight.element_size() // 4

        def wait(target_bytes: int = target_bytes) -> None:
            if not trainer.took_part or trainer.step not in at_steps or trainer.world < 2:
                return
            deadline_s = time.monotonic() + PATIENCE_S
            with trainer.long_phase("transfer"):
                while sent_bytes() < target_bytes and time.monotonic() < deadline_s:
                    time.sleep(0.002)
            if sent_bytes() < target_bytes:
                raise RuntimeError(
                    f"no bucket was sent during the backward pass of step {trainer.step}"
                )

        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=8):
                hidden = _Between.apply(torch.tanh(first(shard.batch)), wait)
                step.backward(last(hidden).square().mean())
