"""Experts of an offloaded model: those that the router chose come, into slots of a cache."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import needs
import numpy as np
import pytest
from make_checkpoint import make_header

import streamload
from streamload.core.dtypes import BF16
from streamload.core.tensors import RowRange
from streamload.core.units import format_bytes
from streamload.errors import CheckpointError, FileChangedError, OffloadError, PlanInfeasibleError

torch = needs.module("torch")
safetensors = needs.module("safetensors.torch")
transformers = needs.module("transformers")

from streamload.checkpoint.open import open_checkpoint  # noqa: E402
from streamload.devices.torch.device import CPUDevice  # noqa: E402
from streamload.offloading.layers import rows_of_experts  # noqa: E402
from streamload.offloading.offload import plan_offload  # noqa: E402
from streamload.offloading.prefetch import Rounds  # noqa: E402
from streamload.offloading.slots import ExpertCache, FileViews  # noqa: E402
from streamload.offloading.torch_experts import number_of_experts, sums_of  # noqa: E402
from streamload.planning.moves import TensorRequest  # noqa: E402
from streamload.planning.sources import Source  # noqa: E402
from streamload.transformers.names import Names  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("MixtralForCausalLM", {"num_local_experts": 8}),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 32, "num_experts": 16}),
    "GptOss": ("GptOssForCausalLM", {"num_local_experts": 8, "sliding_window": 32}),
}


class Saved:
    def __init__(self, name: str, path: Path, sizes: Mapping[str, Any] = MappingProxyType({})):
        self.name, self.path = name, path
        torch.manual_seed(5)
        kind, more = MODELS[name]
        self.config = getattr(transformers, f"{name}Config")(**{**SMALL, **more, **sizes})
        self.config._experts_implementation = "eager"
        model = getattr(transformers, kind)(self.config).to(torch.bfloat16).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.randn(weight.shape) * 0.2)
        model.save_pretrained(path)
        self.kind = getattr(transformers, kind)
        self.fill = self._fill()
        self.nbytes = sum(p.numel() * p.element_size() for p in model.parameters())

    def meta(self) -> Any:
        with torch.device("meta"):
            return self.kind(self.config).to(torch.bfloat16).eval()

    def _fill(self) -> Mapping[str, Source]:
        fill = Names.of(self.meta(), open_checkpoint(self.path)).fill
        return dict(fill)

    def resident(self) -> Any:
        model = self.ready()
        streamload.load_state_dict(model, self.path, mapping=self.fill)
        return model

    def ready(self) -> Any:
        """On the meta device, but for buffers that no checkpoint has."""
        model, real = self.meta(), self.kind(self.config)
        for name, buffer in real.named_buffers():
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._buffers[key] = buffer
        return model

    @contextlib.contextmanager
    def offloaded(self, budget: int, **options: Any) -> Iterator[tuple[Any, Any]]:
        model = self.ready()
        with streamload.offload(
            model, self.path, budget=budget, mapping=self.fill, **options
        ) as offloaded:
            yield model, offloaded

    @property
    def least(self) -> int:
        with pytest.raises(PlanInfeasibleError) as caught, self.offloaded(1000):
            raise AssertionError("it fitted")
        return int(caught.value.needed_nbytes)


@pytest.fixture(scope="module", params=sorted(MODELS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved("Mixtral", tmp_path_factory.mktemp("mixtral"))


TOKENS = [[5, 7, 99, 3, 42, 17, 80, 1, 64], [1, 2, 3, 100, 50, 25, 12, 6, 9]]


def logits(model: Any, tokens: list[list[int]] = TOKENS) -> Any:
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits


def test_ten_budgets(saved: Saved) -> None:
    wanted, least = logits(saved.resident()), saved.least
    top = saved.nbytes + 2**20
    for at in range(10):
        budget = least + (top - least) * at // 9
        with saved.offloaded(budget) as (model, offloaded):
            assert torch.equal(logits(model), wanted), budget
            assert torch.equal(logits(model, TOKENS[:1]), logits(model, TOKENS[:1])), budget
            assert offloaded.plan.needed_nbytes <= budget
            found = offloaded.plan.residency
            if at == 0:
                assert len(found.experts) == 3
                assert found.cache_slots == 2
            if at == 9:
                assert not found.experts


@pytest.mark.parametrize("most", [None, 2, 1023])
def test_the_grouped_implementation(
    saved: Saved, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are those of "grouped_mm", also where its kernel takes groups of any slots."""
    monkeypatch.setattr(saved.config, "_experts_implementation", "grouped_mm")
    given = {}
    if most is not None:
        given["reader"] = "pread"
        groups = "streamload.offloading.torch_experts._most_groups"
        monkeypatch.setattr(groups, lambda module: most)
    wanted, least = logits(saved.resident()), saved.least
    for budget in (least, least + 150_000, (least + saved.nbytes) // 2):
        with saved.offloaded(budget, **given) as (model, offloaded):
            assert offloaded.plan.residency.experts
            for _ in range(2):
                assert torch.equal(logits(model), wanted), budget


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_generate_with_a_cache(saved: Saved, share: float) -> None:
    asked = {"max_new_tokens": 12, "do_sample": False, "use_cache": True}
    prompt = torch.tensor(TOKENS)
    wanted = saved.resident().generate(prompt, **asked)
    least = saved.least
    with saved.offloaded(int(least + (saved.nbytes - least) * share)) as (model, offloaded):
        assert torch.equal(model.generate(prompt, **asked), wanted)
        report = offloaded.report
        assert report.experts.keys() == {*offloaded.plan.residency.experts}
        assert (report.hit_rate > 0.3) == (share > 0)
        assert "experts: " in str(report)


def chosen_by(model: Any, tokens: list[list[int]]) -> list[set[int]]:
    found: list[set[int]] = []

    def look(module: Any, args: Any) -> None:
        found.append({*args[1].flatten().tolist()})

    hooks = [
        each.register_forward_pre_hook(look) for each in model.modules() if number_of_experts(each)
    ]
    logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return found


def read_by_process() -> int:
    """Bytes that this process asked the kernel to read."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def test_only_chosen_experts_are_read(saved: Saved) -> None:
    tokens = [[7]]
    chosen = [len(each) for each in chosen_by(saved.resident(), tokens)]
    budget = (saved.least + saved.nbytes) // 2
    with saved.offloaded(budget, reader="pread") as (model, offloaded):
        expert_nbytes = offloaded.plan.residency.cache_slot_nbytes
        logits(model, tokens)
        first, before = offloaded.report, read_by_process()
        assert [e.misses for e in first.experts.values()] == chosen
        assert 0.8 < first.read_nbytes / (sum(chosen) * expert_nbytes) <= 1
        logits(model, tokens)  # all of them are there
        again = offloaded.report
        assert again.read_nbytes == first.read_nbytes
        assert [e.hits for e in again.experts.values()] == chosen
        assert read_by_process() - before < expert_nbytes


def test_the_kernel_counts_what_is_read(mixtral: Saved) -> None:
    with mixtral.offloaded(mixtral.least, reader="pread") as (model, offloaded):
        logits(model)  # threads start, and headers are checked
        told, counted = offloaded.report.read_nbytes, read_by_process()
        for _ in range(5):
            logits(model, [[7, 8]])
        gathered = 5 * 2 * SMALL["hidden_size"] * 2
        told = offloaded.report.read_nbytes - told + gathered
        counted = read_by_process() - counted
        ahead = 2 * offloaded.plan.residency.arena_nbytes  # layers of the next pass
        assert told <= counted + ahead
        assert counted <= told + ahead


def test_two_models_at_once(mixtral: Saved, tmp_path: Path) -> None:
    """Two models that are offloaded at once, and computed with in turn, keep apart."""
    other = Saved("Qwen3Moe", tmp_path)
    wanted = [logits(each.resident()) for each in (mixtral, other)]
    with (
        mixtral.offloaded((mixtral.least + mixtral.nbytes) // 2) as (one, _),
        other.offloaded(other.least) as (two, _),
    ):
        for _ in range(3):
            assert torch.equal(logits(one), wanted[0])
            assert torch.equal(logits(two), wanted[1])


def test_offload_close_and_offload_again(mixtral: Saved) -> None:
    wanted, model = logits(mixtral.resident()), mixtral.ready()
    options = {"budget": (mixtral.least + mixtral.nbytes) // 2, "mapping": mixtral.fill}
    for _ in range(2):
        with streamload.offload(model, mixtral.path, **options):
            assert torch.equal(logits(model), wanted)
        with pytest.raises((RuntimeError, NotImplementedError, OffloadError)):
            logits(model)
    streamload.load_state_dict(model, mixtral.path, mapping=mixtral.fill)
    assert torch.equal(logits(model), wanted)


def test_a_prompt_leaves_the_experts_that_are_chosen_often(mixtral: Saved) -> None:
    often, prompt = [[7, 9]], [[*range(1, 100)]]
    chosen = chosen_by(mixtral.resident(), often)
    asked = chosen_by(mixtral.resident(), prompt)
    beside = max(len(each - often) for each, often in zip(asked, chosen, strict=True))
    slots = sum(map(len, chosen)) + beside  # least-recently-used would lose some
    assert sum(len(each | often) for each, often in zip(asked, chosen, strict=True)) > slots
    with mixtral.offloaded(mixtral.least + (slots - 2) * 36_864 + 60_000) as (model, offloaded):
        assert sum(map(len, chosen)) < offloaded.plan.residency.cache_slots < 24
        for _ in range(4):
            logits(model, often)
        logits(model, prompt)
        before = offloaded.report
        logits(model, often)
        after = offloaded.report
        missed = [sum(e.misses for e in each.experts.values()) for each in (before, after)]
        # a slot whose copy has just ended may count as taken, and one of these makes room then
        assert missed[1] - missed[0] <= 2 < sum(map(len, chosen)) // 2


def bringing() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "streamload-rounds"]


def test_a_file_that_changed_between_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass raises; with the file as it was, the model runs again."""
    saved = Saved("Mixtral", tmp_path)
    wanted = logits(saved.resident())
    (path,) = tmp_path.glob("*.safetensors")
    data, times = path.read_bytes(), path.stat()
    with saved.offloaded((saved.least + saved.nbytes) // 2) as (model, offloaded):
        logits(model, [[7]])
        monkeypatch.setattr("streamload.offloading.prefetch._IDLE_S", 0.1)
        while bringing():  # its files are let go of
            time.sleep(0.01)
        path.write_bytes(data[:-64] + bytes(64))
        with pytest.raises(FileChangedError):
            logits(model)
        assert not bringing()
        with pytest.raises(FileChangedError):
            logits(model)
        assert offloaded.report.passes == 3
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with saved.offloaded(saved.least) as (model, _):
        assert torch.equal(logits(model), wanted)


def test_an_error_in_the_experts_own_compute(mixtral: Saved) -> None:
    wanted = logits(mixtral.resident())
    with mixtral.offloaded(mixtral.least) as (model, _):
        layer = model.model.layers[1].mlp.experts
        own, calls = layer.act_fn, []

        def fails(states: Any) -> Any:
            calls.append(states)
            if len(calls) == 2:
                raise MemoryError("none is left")
            return own(states)

        layer._modules["act_fn"] = None
        layer.__dict__["act_fn"] = fails
        for _ in range(2):
            calls.clear()
            with pytest.raises(MemoryError, match="none is left"):
                logits(model)
        calls += [None] * 8
        assert torch.equal(logits(model), wanted)


class Late:
    """A ticket of work that the device ends a little later."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        threading.Timer(0.004, self.ended.set).start()

    def wait(self) -> None:
        assert self.ended.wait(20)


def test_slots_are_refilled_when_computing_has_ended(
    mixtral: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, take = Rounds._release, Rounds._take
    under_way: dict[int, list[Late]] = {}  # by slot
    taken: list[int] = []

    def releases(self: Any, numbers: Any, ticket: Any) -> None:
        for number in numbers:
            under_way.setdefault(self._held[number].first, []).append(ticket)
        release(self, numbers, ticket)

    def takes(self: Any, number: int, first: int) -> Any:
        taken.append(first)
        assert all(ticket.ended.is_set() for ticket in under_way.get(first, ()))
        return take(self, number, first)

    monkeypatch.setattr(CPUDevice, "mark", lambda self: Late())
    monkeypatch.setattr(Rounds, "_release", releases)
    monkeypatch.setattr(Rounds, "_take", takes)
    wanted = logits(mixtral.resident())
    for budget in (mixtral.least, mixtral.least + 3 * 36_864, mixtral.least * 3):
        with mixtral.offloaded(budget) as (model, _):
            for _ in range(3):
                assert torch.equal(logits(model), wanted)
    assert len(taken) > 100


def test_two_threads(mixtral: Saved) -> None:
    wanted = logits(mixtral.resident())
    with mixtral.offloaded((mixtral.least + mixtral.nbytes) // 2) as (model, _):
        errors: list[BaseException] = []
        inside, on = threading.Event(), threading.Event()
        layer = model.model.layers[1].mlp.experts
        own = layer.act_fn

        def waits(states: Any) -> Any:
            inside.set()
            on.wait(20)
            return own(states)

        layer._modules["act_fn"] = None
        layer.__dict__["act_fn"] = waits
        first = threading.Thread(target=lambda: errors.append(logits(model)))
        first.start()
        assert inside.wait(20)
        try:
            with pytest.raises(OffloadError, match="two threads run the model"):
                logits(model)
        finally:
            on.set()
            first.join()
        assert torch.equal(errors[0], wanted)
        assert torch.equal(logits(model), wanted)


def test_experts_of_an_unknown_form_stream_with_their_layer(mixtral: Saved) -> None:
    """Where experts compute in another way, all of them come, and the plan says so."""
    experts = type(mixtral.meta().model.layers[0].mlp.experts)
    own = experts.forward.__wrapped__
    wanted = logits(mixtral.resident())
    experts.forward.__wrapped__ = lambda *args: own(*args) * 2
    try:
        with mixtral.offloaded((mixtral.least + mixtral.nbytes) // 2) as (model, offloaded):
            assert not offloaded.plan.residency.experts
            (note,) = offloaded.plan.notes
            assert note.startswith("experts of model.layers.0.mlp.experts and others stream with")
            assert note in str(offloaded.plan)
            assert torch.equal(logits(model), wanted)
    finally:
        experts.forward.__wrapped__ = own


def test_experts_stay_where_it_is_asked(mixtral: Saved) -> None:
    wanted = logits(mixtral.resident())
    stay = "model.layers.1.mlp.experts.*"
    with mixtral.offloaded(int(mixtral.nbytes * 0.8), stay=stay) as (model, offloaded):
        names = offloaded.plan.residency.experts
        assert names == ("model.layers.0.mlp.experts", "model.layers.2.mlp.experts")
        assert model.model.layers[1].mlp.experts.down_proj.device.type == "cpu"
        assert torch.equal(logits(model), wanted)


def test_the_plan_shows_the_cache(mixtral: Saved) -> None:
    with mixtral.offloaded((mixtral.least + mixtral.nbytes) // 2) as (_, offloaded):
        found = offloaded.plan.residency
        text = str(offloaded.plan)
        share = f"{found.cache_slots / 24:.0%} of the 24 experts"
        assert f"{found.cache_slots} slots of experts of 36.86 kB, for {share}" in text
        assert f"experts {format_bytes(found.cache_nbytes)}" in text
        assert found.cache_slots == (offloaded.plan.budget_nbytes - found.resident_nbytes) // 36_864


def test_a_checkpoint_alone_gives_the_same_plan(saved: Saved) -> None:
    """Names and shapes tell what experts are, one by one or fused; `stay` keeps some of them."""
    for budget in (saved.least, (saved.least + saved.nbytes) // 2):
        with saved.offloaded(budget) as (_, offloaded):
            mine = offloaded.plan
        asked = {"budget": budget, "device": "cpu", "dtype": "checkpoint"}
        plan = plan_offload(saved.path, **asked)
        for name in ("cache_slots", "cache_slot_nbytes", "experts_total", "resident_nbytes"):
            assert getattr(plan.residency, name) == getattr(mine.residency, name), name
        assert plan.token_nbytes == mine.token_nbytes
        assert plan.seconds(1e9) == (mine.residency.pass_nbytes + mine.token_nbytes) / 1e9
    kept = plan_offload(
        saved.path, stay="*.layers.1.*.experts.*", **asked | {"budget": int(saved.nbytes * 0.8)}
    )
    assert len(plan.residency.experts) == 3
    assert len(kept.residency.experts) == 2


SUMS = {"Mixtral": "states", "NemotronH": "weights", "GptOss": "states", "DeepseekV3": "states"}


@pytest.mark.parametrize("name", sorted(SUMS))
def test_forms_of_experts(name: str) -> None:
    """How families of transformers add outputs of experts; found out on small weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32}
    config = getattr(transformers, f"{name}Config")(**sizes)
    folder = {"Mixtral": "mixtral", "NemotronH": "nemotron_h", "GptOss": "gpt_oss"}
    module = importlib.import_module(
        f"transformers.models.{folder.get(name, 'deepseek_v3')}.modeling_"
        f"{folder.get(name, 'deepseek_v3')}"
    )
    kind = next(each for key, each in vars(module).items() if key.endswith("Experts"))
    with torch.device("meta"):
        made = kind(config)
    before = torch.random.get_rng_state()
    assert sums_of(made) == SUMS[name]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert number_of_experts(made) > 1
    assert sums_of(torch.nn.Linear(2, 2)) is None


# --- views on the file, and host memory -----------------------------------------------------------


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A small GPT-OSS whose tensors, and experts in these, begin at multiples of 64 in the file."""
    path = tmp_path_factory.mktemp("fused")
    sizes = {"num_attention_heads": 32, "num_local_experts": 32, "sliding_window": 32}
    saved = Saved("GptOss", path, sizes)
    (file,) = path.glob("*.safetensors")
    tensors = safetensors.load(file.read_bytes())
    with file.open("wb") as out:
        out.write(make_header([(name, [*t.shape]) for name, t in tensors.items()], BF16, 0))
        for tensor in tensors.values():
            assert tensor.nbytes % 64 == 0
            out.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return saved


def test_experts_are_views_on_the_file(fused: Saved) -> None:
    wanted, least = logits(fused.resident()), fused.least
    for budget in (least, (least + fused.nbytes) // 2):
        with fused.offloaded(budget) as (model, offloaded):
            found = offloaded.plan.residency
            assert offloaded.plan.views
            assert found.experts
            assert str(offloaded.plan).count("pages of the mapped files") == 1 + (found.slots > 0)
            for _ in range(3):
                assert torch.equal(logits(model), wanted), budget
    with fused.offloaded(least, reader="pread") as (model, offloaded):
        assert not offloaded.plan.views
        assert torch.equal(logits(model), wanted)


def test_an_expert_that_cannot_be_mapped(fused: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer that computes around it lets go of the file, and the model runs again."""
    wanted, bring = logits(fused.resident()), FileViews.bring
    with fused.offloaded(fused.least) as (model, offloaded):
        assert offloaded.plan.views
        assert offloaded.plan.residency.streams  # the layers whose modules have the experts
        inside = [False]

        def fails(self: Any, shard: Any, start: int, stop: int) -> None:
            if inside[0]:
                raise CheckpointError(shard, "its pages cannot be mapped")
            bring(self, shard, start, stop)

        monkeypatch.setattr(FileViews, "bring", fails)
        experts = model.model.layers[1].mlp.experts
        hooks = [experts.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))]
        for _ in range(2):
            inside[0] = False
            with pytest.raises(CheckpointError, match="cannot be mapped"):
                logits(model)
        hooks[0].remove()
        inside[0] = False
        assert torch.equal(logits(model), wanted)


def test_experts_asked_for_while_the_threads_end(
    fused: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, leave = logits(fused.resident()), Rounds._leave_files
    leaving, waited = threading.Event(), threading.Event()

    def leaves(self: Any, *error: Any) -> None:
        leaving.set()
        until = time.monotonic() + 10
        while not self._wanted and not self._closed and time.monotonic() < until:
            time.sleep(0.001)
        if self.users and self._wanted:
            waited.set()
        leave(self, *error)

    with fused.offloaded(fused.least) as (model, offloaded):
        assert offloaded.plan.views
        monkeypatch.setattr(Rounds, "_leave_files", leaves)
        logits(model)
        monkeypatch.setattr("streamload.offloading.prefetch._IDLE_S", 0.1)
        for _ in range(20):  # until a pass begins while they leave
            assert leaving.wait(20)
            leaving.clear()
            assert torch.equal(logits(model), wanted)
            if waited.is_set():
                break
        assert waited.is_set()


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_experts_in_host_memory(mixtral: Saved, layers: int) -> None:
    """Host memory keeps what streams at every pass, and then all experts of some layers."""
    wanted = logits(mixtral.resident())
    with mixtral.offloaded(mixtral.least) as (_, offloaded):
        found = offloaded.plan.residency
        rest, each = found.pass_nbytes, found.experts_nbytes // 3
        assert offloaded.plan.places["host memory"] == 0
    host = rest + layers * each + each // 2
    with mixtral.offloaded(mixtral.least, host=host) as (model, offloaded):
        plan = offloaded.plan
        assert {*plan.host} > {*found.streams} or not layers
        assert len({*plan.host} & {*found.experts}) == layers
        assert plan.host_nbytes == plan.places["host memory"] == rest + layers * each
        assert sum(plan.places.values()) - plan.residency.resident_nbytes == rest + 3 * each
        for _ in range(2):
            assert torch.equal(logits(model), wanted)


# --- the cache by itself --------------------------------------------------------------------------


def ask(cache: ExpertCache, layer: int, chosen: list[int]) -> None:
    held = {cache.holder(slot) for slot in range(cache.slots)}
    cache.ask(layer, chosen, sum(expert in held for expert in cache.numbers(layer, chosen)))


def visit(cache: ExpertCache, layer: int, chosen: list[int]) -> list[int]:
    """Let a layer compute with experts; gives those that made room."""
    dropped = []
    ask(cache, layer, chosen)
    while cache.asked:
        now = cache.asked[: cache.together]
        while (found := cache.next(now)) is not None:
            if (held := cache.holder(found[1])) is not None:
                cache.drop(held)
                dropped.append(held)
            cache.take(*found)
        cache.asked = [each for each in cache.asked if each not in now]
    return dropped


def test_what_is_chosen_least_often_makes_room() -> None:
    cache = ExpertCache([4, 4], 4)
    for _ in range(3):
        visit(cache, 0, [0, 1])
        visit(cache, 1, [2])
    assert visit(cache, 1, [3]) == []
    assert visit(cache, 0, [2]) == [7]
    assert cache.hits == [4, 2]
    assert cache.misses == [3, 2]


def test_old_choices_fade() -> None:
    cache = ExpertCache([4], 2)
    for _ in range(20):
        visit(cache, 0, [0])
    for _ in range(40):
        visit(cache, 0, [1])
    visit(cache, 0, [2])
    for _ in range(40):
        visit(cache, 0, [3])
    ask(cache, 0, [0, 1, 3])
    assert cache.hits[0] - 19 - 39 - 39 == 2


def test_scores_stay_finite() -> None:
    cache = ExpertCache([3, 3], 2)
    for _ in range(40_000):
        ask(cache, 0, [0])
        ask(cache, 1, [1])
    visit(cache, 0, [0])
    visit(cache, 1, [1])
    assert visit(cache, 1, [2]) in ([0], [4])
    assert max(cache._scores) < 1e300


def test_more_experts_than_slots() -> None:
    """A layer that asks for more than there are slots gets all of them, in its order."""
    cache = ExpertCache([10], 3)
    visit(cache, 0, [*range(10)])
    visit(cache, 0, [*range(10)])
    assert cache.hits[0] + cache.misses[0] == 20
    held = [cache.holder(slot) for slot in range(3)]
    cache.ask(0, [each for each in range(10) if each not in held], 0)
    assert cache.next([each for each in held if each is not None]) is None
    assert cache.next() == (cache.asked[0], 0)


def test_split_rows() -> None:
    """Equal parts of rows of several tensors, and parts that cut a row."""
    want = TensorRequest("w", (2, 3, 8), (RowRange("a", 0, 4), RowRange("b", 2, 4)))
    assert rows_of_experts(want, 2) == [
        (RowRange("a", 0, 3),),
        (RowRange("a", 3, 4), RowRange("b", 2, 4)),
    ]
    assert rows_of_experts(want._replace(shape=(4, 12)), 4) is None


@pytest.mark.parametrize("drift", [0.0, 0.1], ids=["skewed", "drifting"])
def test_hit_rates_on_traces(drift: float) -> None:
    """Well above least-recently-used if a router prefers some experts, and few have slots."""
    layers, experts, slots = 12, 32, 48
    random = np.random.default_rng(0)
    weights = np.arange(1, experts + 1) ** -1.2
    likely = np.stack([random.permutation(weights) for _ in range(layers)])
    cache = ExpertCache([experts] * layers, slots)
    recent: dict[tuple[int, int], None] = {}
    hits = asked = 0
    for token in range(200):
        for layer in range(layers):
            if random.random() < drift:
                a, b = random.integers(experts, size=2)
                likely[layer, [a, b]] = likely[layer, [b, a]]
            keys = np.log(likely[layer]) + random.gumbel(size=experts)
            chosen = sorted(map(int, np.argpartition(-keys, 4)[:4]))
            if token % 100 == 0:  # a prompt
                chosen = [*range(experts)]
            visit(cache, layer, chosen)
            for key in ((layer, expert) for expert in chosen):
                asked, hits = asked + 1, hits + (key in recent)
                recent.pop(key, None)
                recent[key] = None
                if len(recent) > slots:
                    del recent[next(iter(recent))]
    assert sum(cache.hits) / asked > hits / asked + 0.1
