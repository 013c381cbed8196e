"""Tables of rotary embeddings: each row equals the module's output for that position alone, or there is no table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PhimoeConfig
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from checkpoints import longrope, mixtral, phimoe, seeded
from spmoe.models import rotary
from spmoe.models.attention import device_ranges
from spmoe.models.longrope import rotary_modules
from spmoe.models.rotary import make_table, table_bytes, use_tables

SWITCH = 20
MAX_POSITIONS = 256  # of the models
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
PROBE = torch.zeros(1, 1, 1)


def rotary_module(make: Any, parameters: dict[str, Any]) -> Any:
    (module,) = rotary_modules(seeded(make, 0, rope_parameters=dict(parameters)))
    return module


def alone(module: Any, position: int) -> tuple[Tensor, ...]:
    return tuple(module(PROBE, torch.tensor([[position]])))


@pytest.mark.parametrize("positions", [SWITCH - 5, SWITCH, SWITCH + 1, 100])
@pytest.mark.parametrize("parameters", [DEFAULT, longrope(SWITCH)], ids=lambda p: p["rope_type"])
@pytest.mark.parametrize("make", [phimoe, mixtral])
def test_every_row_equals_the_modules_output(make: Any, parameters: dict[str, Any], positions: int) -> None:
    module = rotary_module(make, parameters)
    table = make_table(module, None, PROBE, positions)
    assert table is not None
    for position in range(positions):
        rows = table.rows(torch.tensor([[position]]))
        assert all(torch.equal(a, b) for a, b in zip(rows, alone(module, position), strict=True)), position


def test_block_size_does_not_change_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    module = rotary_module(phimoe, longrope(SWITCH))
    whole = make_table(module, None, PROBE, 100)
    monkeypatch.setattr(rotary, "_BLOCK", 7)
    in_blocks = make_table(module, None, PROBE, 100)
    assert whole is not None
    assert in_blocks is not None
    assert all(torch.equal(a, b) for a, b in zip(whole, in_blocks, strict=True))


def test_table_switches_factors() -> None:
    table = make_table(rotary_module(phimoe, longrope(SWITCH)), None, PROBE, 100)
    assert table is not None
    size = (table[0].square() + table[1].square()).sqrt()  # cosine and sine, times a factor
    assert torch.allclose(size[:SWITCH], torch.tensor(1.0))
    assert torch.allclose(size[SWITCH:], torch.tensor(1.7))


def test_dynamic_rope_has_no_table_beyond_the_models_context() -> None:
    module = rotary_module(mixtral, DYNAMIC)
    before = module.inv_freq.clone()
    assert make_table(module, None, PROBE, MAX_POSITIONS) is not None
    assert make_table(module, None, PROBE, 2 * MAX_POSITIONS) is None
    assert torch.equal(module.inv_freq, before), "the module itself is unchanged"
    assert module.max_seq_len_cached == MAX_POSITIONS


class Drifting(PhimoeRotaryEmbedding):
    """Its output depends on the number of positions."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        cos, sin = super().forward(x, position_ids)
        return cos + 1e-6 * position_ids.shape[1], sin


def test_table_with_a_rounding_difference_is_rejected() -> None:
    module = Drifting(PhimoeConfig(hidden_size=32, num_attention_heads=4, rope_parameters=dict(DEFAULT)))
    assert make_table(module, None, PROBE, 64) is None


@pytest.mark.parametrize(
    ("make", "parameters", "needed"),
    [
        (mixtral, DEFAULT, False),
        (mixtral, DYNAMIC, True),
        (mixtral, longrope(SWITCH), True),
        (phimoe, DEFAULT, True),
        (phimoe, longrope(SWITCH), True),
    ],
)
def test_tables_are_used_where_needed_and_only_during_capture(make: Any, parameters: Any, needed: bool) -> None:
    model = seeded(make, 0, rope_parameters=dict(parameters))
    (module,) = rotary_modules(model)
    undo = use_tables(model, 100)
    assert ("forward" in vars(module)) == needed
    assert (table_bytes(model, 100, torch.float32) > 0) == needed
    if needed:
        positions = torch.tensor([[SWITCH - 2, SWITCH - 1, SWITCH, SWITCH + 1]])
        own = type(module).forward(module, PROBE, positions)
        assert all(torch.equal(a, b) for a, b in zip(module(PROBE, positions), own, strict=True)), (
            "outside of a capture"
        )
        with device_ranges(torch.tensor([[0], [SWITCH - 2], [100]])):
            found = module(PROBE, positions)
        expected = [torch.cat(rows, dim=1) for rows in zip(*(alone(module, int(p)) for p in positions[0]), strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert sum(t.numel() // positions.numel() * 100 * t.itemsize for t in found) == table_bytes(
            model, 100, torch.float32
        )
    undo()
    assert "forward" not in vars(module)


def test_positions_beyond_the_table_get_the_last_row() -> None:
    table = make_table(rotary_module(phimoe, DEFAULT), None, PROBE, 8)
    assert table is not None
    assert torch.equal(table.rows(torch.tensor([[7, 8, 4000]]))[0][0], table[0][[7, 7, 7]])


def test_layer_types_have_separate_tables() -> None:
    from transformers.models.mellum.modeling_mellum import MellumRotaryEmbedding

    from spmoe.models.families import tiny_config

    config = tiny_config("mellum")
    kinds = set(config.layer_types)
    config.rope_parameters = {kind: dict(DYNAMIC, rope_theta=10.0 ** (2 + n)) for n, kind in enumerate(sorted(kinds))}
    module: Any = MellumRotaryEmbedding(config)
    model = torch.nn.Module()
    model.rotary, model.dtype, model.device = module, torch.float32, torch.device("cpu")  # type: ignore[assignment]
    use_tables(model, 50)
    positions = torch.tensor([[3, 40]])
    for kind in kinds:
        own = type(module).forward(module, PROBE, positions, kind)
        with device_ranges(torch.tensor([[0], [3], [50]])):
            found = module(PROBE, positions, kind)
        assert all(torch.equal(a, b) for a, b in zip(found, own, strict=True))
    assert len(kinds) == 2
    width = found[0].shape[-1]
    assert table_bytes(model, 50, torch.float32) == 50 * 2 * 2 * width * 4
