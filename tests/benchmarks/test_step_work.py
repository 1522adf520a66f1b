"""The work that floors are measured of is that of the steps: products counted by hand."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.programs import BENCHMARKS

ROWS, LENGTH = 2, 64
TOKENS = ROWS * LENGTH


@pytest.fixture
def step_work(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from peers import step_work

    return step_work


@pytest.fixture
def shape(step_work: ModuleType) -> Any:
    from peers.shapes import Shape

    return Shape(64, 128, layers=3, heads=4, kv_heads=2, vocabulary=512)


def multiplied(products: Any, *, backward: bool) -> int:
    """Multiplications of a step's products."""
    return sum(
        product.rows * product.inner * product.columns * product.count
        for product in products
        if product.backward == backward
    )


def test_every_weight_of_a_llama_is_multiplied_thrice(step_work: ModuleType, shape: Any) -> None:
    step = step_work.llama_step(shape, ROWS, LENGTH, 2)
    norms = shape.hidden * (2 * shape.layers + 1)
    weights = shape.parameters - norms
    assert multiplied(step.products, backward=False) == TOKENS * weights
    assert multiplied(step.products, backward=True) == 2 * TOKENS * weights
    assert step.updated_bytes == 8 * 2 * weights
    assert not any(product.bf16 for product in step.products)
    assert (step.attention.count, step.attention.causal) == (3, True)


def test_a_llama_attends_within_documents_of_all_its_steps(
    step_work: ModuleType, shape: Any
) -> None:
    whole = step_work.llama_step(shape, ROWS, LENGTH, 2)
    assert step_work.llama_step(shape, ROWS, LENGTH, 2, (LENGTH,) * ROWS) == whole
    steps = ((32, 32, 64), (16, 16, 16, 16, 50, 14))
    within = step_work.llama_step(shape, ROWS, LENGTH, 2, [*steps[0], *steps[1]])
    assert within.products == whole.products
    assert within.updated_bytes == whole.updated_bytes
    attention = within.attention
    assert (attention.count, attention.causal) == (3, True)
    assert attention.rows * attention.length == TOKENS
    given = sum(tokens**2 for documents in steps for tokens in documents) / len(steps)
    assert given / 2 < attention.rows * attention.length**2 <= given


def test_adapters_leave_out_what_a_frozen_base_does_not_need(
    step_work: ModuleType, shape: Any
) -> None:
    rank = 4
    step = step_work.adapter_step(shape, ("q_proj", "v_proj"), rank, ROWS, LENGTH)
    base = [product for product in step.products if not product.bf16]
    around = [product for product in step.products if product.bf16]
    weights = shape.parameters - shape.hidden * (2 * shape.layers + 1)
    assert multiplied(base, backward=False) == TOKENS * weights
    # The weights' gradients, and what lies in front of the first block: its q, k and v.
    first = 64 * (64 + 2 * 32)
    assert multiplied(base, backward=True) == TOKENS * (weights - first)
    adapters = 3 * rank * ((64 + 64) + (64 + 32))
    assert multiplied(around, backward=False) == TOKENS * adapters
    downs_of_first = 2 * rank * 64
    assert multiplied(around, backward=True) == TOKENS * (2 * adapters - downs_of_first)
    assert step.updated_bytes == 7 * 4 * adapters


def test_adapters_that_read_the_same_input_go_down_as_one(
    step_work: ModuleType, shape: Any
) -> None:
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    step = step_work.adapter_step(shape, every, 4, ROWS, LENGTH)
    downs = [
        product.columns
        for product in step.products
        if product.bf16 and not product.backward and product.inner != 4
    ]
    ups = [product for product in step.products if not product.backward and product.inner == 4]
    assert downs == [12, 4, 8, 4]
    assert sorted(product.columns for product in ups) == sorted([64, 32, 32, 64, 128, 128, 64])


def test_encoder_attends_within_documents(step_work: ModuleType) -> None:
    from peers.shapes import Shape

    shape = Shape(64, 128, layers=3, heads=4, kv_heads=4, vocabulary=500)
    documents = (40, 14, 10, 64)
    step = step_work.encoder_step(shape, ROWS, LENGTH, documents, parameters=1000)
    attention = step.attention
    assert not attention.causal
    assert attention.rows * attention.length == TOKENS
    given = sum(tokens**2 for tokens in documents)
    assert given / 2 < attention.rows * attention.length**2 <= given
    block = 4 * 64 * 64 + 2 * 64 * 128
    weights = 3 * block + 64 * 64 + 64 * 500
    assert multiplied(step.products, backward=False) == TOKENS * weights
    assert multiplied(step.products, backward=True) == 2 * TOKENS * weights
    assert {p.bf16 for p in step.products if 500 in (p.rows, p.inner, p.columns)} == {True}
    assert step.updated_bytes == 7 * 4 * 1000
