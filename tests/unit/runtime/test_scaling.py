"""Learning rates that follow the batch: pure rules, real optimizers, and Adam's noise simulated."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.elastic.scaling import RULES, BatchScaler, Hyperparameters
from chaoskit.errors import BadInput

ADAM = Hyperparameters(lr=3e-4, batch=256, betas=(0.9, 0.95), eps=1e-8, decay=0.1)
SGD = Hyperparameters(lr=0.1, batch=256)
BASES = {"linear": SGD, "square-root": ADAM, "none": ADAM}

NAMES = st.sampled_from(sorted(RULES))
FACTORS = st.floats(0.1, 3.0)
BATCHES = st.integers(8, 2048)
#: (steps since the change before, batch)
HISTORIES = st.lists(st.tuples(st.integers(0, 20), BATCHES), max_size=6)


def history(
    name: str, changes: list[tuple[int, int]], warmup_steps: int
) -> tuple[BatchScaler, int]:
    scaling, step = BatchScaler(name, BASES[name], warmup_steps=warmup_steps), 0
    for stride, batch in changes:
        step += stride
        scaling.change(step, batch)
    return scaling, step


def scaled(name: str, values: Hyperparameters, factor: float) -> list[float]:
    rule, rest = RULES[name], RULES[name].adjust(values, factor)
    return [values.lr * rule.rate(factor), *(rest.betas or ()), rest.eps or 0.0, rest.decay]


@given(NAMES, FACTORS, FACTORS)
def test_two_changes_are_one_by_the_product(name: str, first: float, second: float) -> None:
    base, rule = BASES[name], RULES[name]
    between = rule.adjust(base, first)
    lr = base.lr * rule.rate(first)
    twice = scaled(
        name,
        Hyperparameters(lr=lr, batch=1, betas=between.betas, eps=between.eps, decay=between.decay),
        second,
    )
    assert twice == pytest.approx(scaled(name, base, first * second), rel=1e-9)


@given(FACTORS)
def test_square_root_keeps_the_constants_of_the_equation(factor: float) -> None:
    lr, beta1, beta2, eps, decay = scaled("square-root", ADAM, factor)
    assert lr**2 / factor == pytest.approx(ADAM.lr**2)
    assert (1 - beta1) / lr**2 == pytest.approx((1 - 0.9) / ADAM.lr**2)
    assert (1 - beta2) / lr**2 == pytest.approx((1 - 0.95) / ADAM.lr**2)
    assert lr * eps == pytest.approx(ADAM.lr * 1e-8)
    assert lr * decay / factor == pytest.approx(ADAM.lr * ADAM.decay)


def test_linear_keeps_what_a_sample_does() -> None:
    assert scaled("linear", SGD, 4.0)[0] / 4 == SGD.lr


@given(NAMES, HISTORIES, st.integers(0, 30))
def test_return_to_the_base_is_exact(
    name: str, changes: list[tuple[int, int]], warmup_steps: int
) -> None:
    scaling, step = history(name, changes, warmup_steps)
    scaling.change(step, scaling.base.batch)
    effective = scaling.at(step + warmup_steps)
    assert effective.values == scaling.base
    assert (effective.factor, effective.multiplier, effective.samples) == (1.0, 1.0, 256)


def test_betas_whose_complement_is_rounded_return_exactly() -> None:
    base = Hyperparameters(lr=0.3, batch=256, betas=(0.1, 0.3), eps=0.1, decay=0.3)
    assert 1 - (1 - 0.1) != 0.1
    assert BatchScaler("square-root", base, changes=[(1, 100), (2, 256)]).at(2).values == base


@given(NAMES, HISTORIES, BATCHES, st.integers(0, 30))
def test_a_size_has_one_rate_whatever_came_before(
    name: str, changes: list[tuple[int, int]], batch: int, warmup_steps: int
) -> None:
    scaling, step = history(name, changes, warmup_steps)
    scaling.change(step, batch)
    straight, _ = history(name, [(0, batch)], 0)
    assert scaling.at(step + warmup_steps).values == straight.at(0).values


@given(NAMES, HISTORIES, BATCHES, st.integers(0, 30))
def test_a_rate_rises_on_a_line_and_falls_at_once(
    name: str, changes: list[tuple[int, int]], batch: int, warmup_steps: int
) -> None:
    scaling, step = history(name, changes, warmup_steps)
    step += 1
    before, old = scaling.multiplier(step), scaling.at(step).samples
    scaling.change(step, batch)
    ramp = [scaling.multiplier(step + passed) for passed in range(warmup_steps + 2)]
    reached = RULES[name].rate(batch / 256)
    assert ramp[-1] == reached
    if batch != old:
        assert ramp[0] == (before if warmup_steps and before < reached else reached)
    assert ramp == sorted(ramp)
    rises = np.diff(ramp[: warmup_steps + 1])
    if batch != old and before < reached and warmup_steps > 1:
        assert rises == pytest.approx([(reached - before) / warmup_steps] * warmup_steps, abs=1e-9)


@given(NAMES, HISTORIES, st.integers(0, 30))
def test_a_run_that_goes_on_has_the_same_rates(
    name: str, changes: list[tuple[int, int]], warmup_steps: int
) -> None:
    scaling, step = history(name, changes, warmup_steps)
    again = BatchScaler(name, scaling.base, warmup_steps=warmup_steps, changes=scaling.changes)
    steps = range(step + warmup_steps + 2)
    assert [again.at(number) for number in steps] == [scaling.at(number) for number in steps]


# -- real optimizers -------------------------------------------------------------------------------


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


def test_a_users_schedule_is_multiplied_and_stays_its_own() -> None:
    weights = parameter()
    optimizer = torch.optim.AdamW(
        [{"params": [weights]}], lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    twin = torch.optim.lr_scheduler.CosineAnnealingLR(
        torch.optim.AdamW([parameter()], lr=3e-4), T_max=10
    )
    scaling = BatchScaler("square-root", ADAM)
    scaling.change(2, 64)
    scaling.change(6, 256)
    for step in range(8):
        group = optimizer.param_groups[0]
        rate, saved = group["lr"], optimizer.state_dict()["param_groups"]
        with scaling.apply(optimizer, step):
            with scaling.apply(optimizer, step):
                assert group["lr"] == rate * (0.5 if 2 <= step < 6 else 1.0)
            assert group["betas"] == (
                (1 - 0.25 * (1 - 0.9), 1 - 0.25 * (1 - 0.95)) if 2 <= step < 6 else (0.9, 0.95)
            )
            assert group["eps"] == (2e-8 if 2 <= step < 6 else 1e-8)
            assert group["weight_decay"] == (0.05 if 2 <= step < 6 else 0.1)
            weights.grad = torch.ones(3)
            optimizer.step()
        assert optimizer.state_dict()["param_groups"] == saved
        assert rate == twin.get_last_lr()[0]
        schedule.step()
        twin.optimizer.step()
        twin.step()


def test_a_failed_step_leaves_the_users_values() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1, momentum=0.9)
    scaling = BatchScaler("linear", SGD, changes=[(0, 512)])
    rates_in_step = []

    def fail(*_: object) -> None:
        rates_in_step.append(optimizer.param_groups[0]["lr"])
        raise RuntimeError

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError), scaling.apply(optimizer, 0):
        optimizer.step()
    assert rates_in_step == [0.2]
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_each_group_follows_with_its_own_values() -> None:
    groups = [
        {"params": [parameter()], "lr": 0.1},
        {"params": [parameter()], "lr": 0.01, "weight_decay": 0.5},
    ]
    optimizer = torch.optim.SGD(groups)
    with BatchScaler("linear", SGD, changes=[(0, 512)]).apply(optimizer, 3):
        assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
            (0.2, 0),
            (0.02, 0.5),
        ]


def test_the_same_bits_as_without_it_at_the_base() -> None:
    results = []
    for batches in ([], [(1, 512), (2, 256)]):
        weights = parameter()
        optimizer = torch.optim.Adam([weights], lr=3e-4, betas=(0.9, 0.95))
        scaling = BatchScaler("square-root", ADAM, changes=batches)
        for step in (0, 2, 3):
            weights.grad = torch.tensor([0.1, 0.2, 0.3]) * (step + 1)
            with scaling.apply(optimizer, step):
                optimizer.step()
        results.append(weights.detach().clone())
    assert torch.equal(*results)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "rule", "base", "changes"),
    [
        ("rule", "cube", SGD, []),
        ("rule", "linear", ADAM, []),
        ("rule", "square-root", SGD, []),
        ("beta1", "square-root", ADAM, [(0, 2560)]),
        ("beta1", "square-root", Hyperparameters(lr=1.0, batch=1, betas=(0.0, 0.9), eps=0.0), []),
        ("beta2", "none", Hyperparameters(lr=1.0, batch=1, betas=(0.0, 1.0), eps=0.0), []),
        ("batch", "linear", SGD, [(0, 0)]),
        ("batch", "linear", SGD, [(0, 256 * 33)]),
        ("batch", "linear", SGD, [(0, 7)]),
        ("step", "linear", SGD, [(4, 512), (3, 256)]),
        ("lr", "linear", Hyperparameters(lr=math.nan, batch=1), []),
        ("eps", "none", Hyperparameters(lr=1.0, batch=1, eps=math.inf), []),
        ("decay", "none", Hyperparameters(lr=1.0, batch=1, decay=-1.0), []),
    ],
)
def test_what_the_theory_does_not_cover(
    field: str, rule: str, base: Hyperparameters, changes: list[tuple[int, int]]
) -> None:
    with pytest.raises(BadInput) as refused:
        BatchScaler(rule, base, changes=changes)
    assert refused.value.field == field


def test_a_refused_batch_changes_nothing() -> None:
    scaling = BatchScaler("square-root", ADAM, changes=[(1, 128)])
    with pytest.raises(BadInput, match=r"less than 10:"):
        scaling.change(2, 2560)
    assert scaling.changes == [(1, 128)]


@pytest.mark.parametrize(
    ("field", "optimizer"),
    [
        ("amsgrad", torch.optim.Adam([parameter()], amsgrad=True)),
        ("optimizer", torch.optim.RMSprop([parameter()])),
        ("optimizer", torch.optim.Adamax([parameter()])),
        ("lr", torch.optim.Adam([parameter()], lr=torch.tensor(0.1), capturable=True)),
        ("rule", torch.optim.SGD([parameter()])),
        ("dampening", torch.optim.SGD([parameter()], momentum=0.9, dampening=0.1)),
    ],
)
def test_optimizers_that_the_rule_does_not_cover(
    field: str, optimizer: torch.optim.Optimizer
) -> None:
    with pytest.raises(BadInput) as refused, BatchScaler("square-root", ADAM).apply(optimizer, 0):
        pass
    assert refused.value.field == field


# -- the noise itself ------------------------------------------------------------------------------


def final_spread(values: Hyperparameters, steps: int, noise: float) -> tuple[float, float]:
    """Return mean and standard deviation of 4000 weights in a parabola after ``steps`` of Adam on
    noisy gradients.
    """
    assert values.betas is not None
    assert values.eps is not None
    (beta1, beta2), random = values.betas, np.random.default_rng(7)
    weights, mean, square = np.full(4000, 1.0), np.zeros(4000), np.zeros(4000)
    for step in range(1, steps + 1):
        gradient = weights + noise * random.standard_normal(4000)
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        corrected = np.sqrt(square / (1 - beta2**step)) + values.eps
        weights = weights - values.lr * mean / (1 - beta1**step) / corrected
    return float(weights.mean()), float(weights.std())


def test_square_root_keeps_the_distribution_of_the_weights() -> None:
    base = Hyperparameters(lr=0.02, batch=1, betas=(0.98, 0.995), eps=0.5)
    steps, noise = 1600, 4.0
    reference = final_spread(base, steps, noise)
    distances = {}
    for name, rate in (("square-root", 2.0), ("linear", 4.0), ("none", 1.0)):
        rest = RULES["square-root"].adjust(base, 4.0) if name == "square-root" else base
        four = Hyperparameters(lr=base.lr * rate, batch=4, betas=rest.betas, eps=rest.eps)
        spread = final_spread(
            four, steps // 4, noise / 2
        )  # as many samples, of half the noise each step
        distances[name] = (
            abs(spread[1] / reference[1] - 1) + abs(spread[0] - reference[0]) / reference[1]
        )
    assert distances["square-root"] < 0.1
    assert min(distances["linear"], distances["none"]) > 0.25
