"""What stays on a device, and what streams: `streamload.offloading.layers`."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.offloading.layers import LayerSize, Module, Residency, choose, least, without_small

_KINDS = st.sampled_from(["layer", "layer", "layer", "rows", "fixed"])


@st.composite
def models(draw: st.DrawFn) -> list[LayerSize]:
    """Layers of a few sizes, as models have them, and some of others."""
    usual = draw(st.lists(st.integers(1, 4000), min_size=1, max_size=3))
    layers = []
    for number in range(draw(st.integers(1, 12))):
        nbytes = draw(st.sampled_from(usual)) * 512
        rounding = draw(st.integers(0, 511))
        layers.append(
            LayerSize(f"l{number}", draw(_KINDS), nbytes, nbytes - rounding, nbytes - rounding)
        )
    return layers


def _size(layers: list[LayerSize], names: tuple[str, ...]) -> int:
    return sum(layer.resident_nbytes for layer in layers if layer.name in names)


def _check(layers: list[LayerSize], room_nbytes: int, found: Residency) -> None:
    names = [layer.name for layer in layers]
    assert sorted((*found.stays, *found.streams, *found.gathers)) == sorted(names)
    assert found.taken_nbytes <= room_nbytes
    assert found.resident_nbytes == _size(layers, found.stays)
    kinds = {layer.name: layer.kind for layer in layers}
    assert all(kinds[name] == "layer" for name in found.streams)
    assert all(kinds[name] == "rows" for name in found.gathers)
    for layer in layers:
        if layer.name in found.streams:  # it fits into the slots, side by side
            assert layer.nbytes <= found.arena_nbytes
            assert -(-layer.nbytes // found.slot_nbytes) <= found.slots
    assert [name for name in names if name in found.stays] == list(found.stays)
    assert [name for name in names if name in found.streams] == list(found.streams)


@settings(max_examples=150, deadline=None)
@given(models(), st.floats(0, 1.2))
def test_a_decision_holds_every_layer_once_and_never_takes_more_than_the_room(
    layers: list[LayerSize], share: float
) -> None:
    room = int(share * _size(layers, tuple(layer.name for layer in layers)))
    found = choose(layers, room)
    assert (found is not None) == (room >= least(layers))
    if found is not None:
        _check(layers, room, found)


@settings(max_examples=150, deadline=None)
@given(models())
def test_the_least_is_accepted_and_a_byte_less_is_refused(layers: list[LayerSize]) -> None:
    room = least(layers)
    found = choose(layers, room)
    assert found is not None
    _check(layers, room, found)
    assert room == 0 or choose(layers, room - 1) is None


@settings(max_examples=100, deadline=None)
@given(models(), st.lists(st.floats(0, 1.1), min_size=2, max_size=8))
def test_more_room_never_costs_more_bytes_a_pass(
    layers: list[LayerSize], shares: list[float]
) -> None:
    """Bytes that a pass reads, with what nothing hides counted half more, only become fewer."""
    everything = _size(layers, tuple(layer.name for layer in layers))
    before = None
    for share in sorted(shares):
        found = choose(layers, int(share * everything))
        if found is None:
            assert before is None
            continue
        cost = _exposed(layers, found)
        assert before is None or cost <= before
        before = cost


def _exposed(layers: list[LayerSize], found: Residency) -> float:
    """What a pass reads; a layer that takes all slots hides behind nothing."""
    sizes = {layer.name: layer for layer in layers}
    cost = 0.0
    for name in found.streams:
        layer = sizes[name]
        alone = -(-layer.nbytes // found.slot_nbytes) >= found.slots
        cost += layer.read_nbytes * (1.5 if alone else 1.0)
    return cost


def test_what_fits_stays_and_takes_no_slots() -> None:
    layers = [LayerSize(f"l{n}", "layer", 1024, 1000, 1000) for n in range(8)]
    found = choose(layers, 8000)
    assert found is not None and found.stays == tuple(layer.name for layer in layers)
    assert (found.slots, found.pass_nbytes, found.taken_nbytes) == (0, 0, 8000)


def test_what_stays_is_spread_evenly_between_what_streams() -> None:
    layers = [LayerSize(f"l{n:02}", "layer", 1024, 1024, 1024) for n in range(32)]
    for kept in range(2, 16):
        found = choose(layers, (kept + 2) * 1024)
        assert found is not None
        assert len(found.stays) == kept
        at = [int(name[1:]) for name in found.stays]
        gaps = [b - a for a, b in pairwise(at)]
        around = at[0] + 32 - at[-1]
        assert max(*gaps, around) - min(*gaps, around) <= 2, at


def test_about_the_same_share_of_each_size_stays() -> None:
    """Transfers are as long as computing in all parts of a pass, not only over the whole."""
    large, small = [f"d{n}" for n in range(19)], [f"s{n}" for n in range(38)]
    sizes = [(name, 680_000) for name in large] + [(name, 283_000) for name in small]
    layers = [LayerSize(name, "layer", nbytes, nbytes, nbytes) for name, nbytes in sizes]
    for share in (0.3, 0.35, 0.4, 0.45):  # with more, slots for the large ones cost too much
        found = choose(layers, int(share * sum(nbytes for _, nbytes in sizes)))
        assert found is not None
        parts = [len({*found.streams} & {*names}) / len(names) for names in (large, small)]
        assert abs(parts[0] - parts[1]) < 0.1


def test_small_tensors_of_a_layer_are_a_small_share_of_it_together() -> None:
    """The smallest stay: of one large tensor's layer all, of thousands of equal ones few."""
    rest, groups = without_small([Module("a", [0, 1, 2], True)], [10**6, 200, 100])
    assert rest[0].numbers == [0] and groups[0].wants == (1, 2)
    many = [1000] * 5000
    rest, groups = without_small([Module("a", [*range(5000)], True)], many)
    assert len(groups[0].wants) == 50 and len(rest[0].numbers) == 4950
    assert without_small([Module("a", [0, 1], False)], [10**6, 1])[1] == []
