"""`convert(quant=)` of models that transformers knows: what is written is opened again."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs
import pytest
from conversions import quiet as convert
from transformers_quantized_helpers import load, logits, needs_library, plain, quiet, reference
from transformers_quantizing_helpers import error, make, said_in

import streamload
from streamload.conversion import convert as module
from streamload.conversion import openable
from streamload.conversion.openable import Verdict
from streamload.errors import CheckpointError
from streamload.planning.quant_policy import QuantPolicy

torch = needs.module("torch")
transformers = needs.module("transformers")

__all__ = ["quiet"]

POPEN = subprocess.Popen
FALCON = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def falcon(folder: Path) -> None:
    transformers.FalconForCausalLM(transformers.FalconConfig(**FALCON)).save_pretrained(folder)


@pytest.mark.parametrize("format", ["nf4", "int8", "q8_0"])
def test_a_model_that_holds_none_is_refused(tmp_path: Path, format: str) -> None:
    falcon(tmp_path / "in")
    for call in (
        lambda: convert(tmp_path / "in", tmp_path / "out", quant=format),
        lambda: load(tmp_path / "in", quant=format),
    ):
        with pytest.raises(ValueError, match=r"torch's Linear.*theirs are FalconLinear"):
            call()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_experts_stay_as_they_are(tmp_path: Path, name: str) -> None:
    """A note says so; diff and verify know it; what is written is opened."""
    make(tmp_path / "in", name, torch.float32)
    out = tmp_path / "out"
    report = convert(tmp_path / "in", out, quant="q8_0", verify=True)
    assert len(report.errors) == 8
    (note,) = (note for note in report.plan.notes if note.startswith("not quantised, 24 tensors"))
    assert f"({name}Experts)" in note
    assert said_in(out)["quant_method"] == "streamload"
    assert error(logits(load(out)), logits(load(tmp_path / "in"))) < 0.02
    assert streamload.diff(tmp_path / "in", out, quant="q8_0", progress=False).ok
    assert convert(tmp_path / "in", out, quant="q8_0", resume=True).read_nbytes == 0
    other = streamload.diff(tmp_path / "in", tmp_path / "in", quant="q8_0", progress=False)
    assert not other.ok
    with pytest.raises(ValueError, match=r'opens no int8 in this model.*quant="nf4"'):
        convert(tmp_path / "in", tmp_path / "none", quant="int8")


@pytest.mark.parametrize("format", ["nf4", "bitsandbytes-int8", "int8"])
@pytest.mark.parametrize("name", ["Llama", "Mixtral", "GPT2"])
def test_transformers_opens_what_is_written(tmp_path: Path, name: str, format: str) -> None:
    make(tmp_path / "in", name, torch.float32)
    needs_library("bitsandbytes")
    needs_library("compressed_tensors")
    if format == "int8" and name != "Llama":
        pytest.skip("it is refused: another test")
    convert(tmp_path / "in", tmp_path / "out", quant=format)
    found = logits(load(tmp_path / "out"))
    assert error(found, logits(reference(tmp_path / "out", device_map="cpu"))) < 1e-3
    assert error(found, logits(load(tmp_path / "in"))) < 0.05


def test_what_is_no_weight_of_a_product_stays(tmp_path: Path) -> None:
    """Tables of positions, and what the model does not have; names of several formats."""
    plain(tmp_path / "in")
    quant = {"*embed*": "nf4", "*.mlp.*": "nf4", "*": "q8_0"}
    report = convert(tmp_path / "in", tmp_path / "out", quant=quant)
    assert any("Embedding" in note for note in report.plan.notes)
    formats = said_in(tmp_path / "out")["formats"]
    assert {format: len(names) for format, names in formats.items()} == {"nf4": 6, "q8_0": 8}
    assert error(logits(load(tmp_path / "out")), logits(load(tmp_path / "in"))) < 0.05


def test_what_would_not_be_opened_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falcon(tmp_path / "in")
    names = ["transformer.h.0.mlp.dense_4h_to_h.weight"]
    said = {"quant_method": "streamload", "formats": {"q4_0": names}}  # q8_0 is written
    verdict = Verdict(said=said, known=True)
    monkeypatch.setattr(module, "asked_of_models", lambda *_: verdict)
    with pytest.raises(CheckpointError, match=r"is not published: .*dense_4h_to_h"):
        convert(tmp_path / "in", tmp_path / "out", quant={names[0]: "q8_0"})
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".streamload"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": 128}, r"of another shape .*expected \["),
        ({"num_local_experts": 8}, r"of another shape .*gate\.weight: expected \[8"),
        ({"num_hidden_layers": 3}, r"missing from the checkpoint \(model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"unexpected in the checkpoint \(model\.layers\.1\."),
    ],
)
def test_another_config_json_is_not_published(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    """Of a model that is not written as GGUF: transformers opens what a plain conversion wrote."""
    make(tmp_path / "in", "Mixtral")
    convert(tmp_path / "in", tmp_path / "plain", dtype="float32")
    stated = json.loads((tmp_path / "in/config.json").read_text()) | config
    (tmp_path / "in/config.json").write_text(json.dumps(stated))
    with pytest.raises(
        CheckpointError, match=rf"not published: .*{said}.*the config\.json of these"
    ):
        convert(tmp_path / "in", tmp_path / "out", dtype="float32")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".streamload"]
    convert(tmp_path / "in", tmp_path / "part", dtype="float32", exclude="*.norm.*")


def test_layers_that_predict_more_tokens_stay(tmp_path: Path) -> None:
    """They are not those of the model, which has no place for them."""
    torch.manual_seed(0)
    config = transformers.Glm4Config(**FALCON, head_dim=32, pad_token_id=0, num_key_value_heads=1)
    model = transformers.Glm4ForCausalLM(config)
    state = dict(model.state_dict())
    state |= {
        n.replace("layers.0", "layers.1"): t.clone() for n, t in state.items() if "layers.0" in n
    }
    state["model.layers.1.enorm.weight"] = torch.ones(64)
    count = len(state)  # saving empties it
    model.save_pretrained(tmp_path / "in", state_dict=state)
    report = convert(tmp_path / "in", tmp_path / "out", dtype="float16")
    assert report.plan.tensor_count == count


@pytest.mark.parametrize("format", ["q8_0", "q4_0", "q5_0", "q5_1"])
def test_a_gpt2_of_blocks_is_opened(tmp_path: Path, format: str) -> None:
    """Its Conv1D has a Linear's weight in blocks, as a model that was loaded and saved has it."""
    make(tmp_path / "in", "GPT2", torch.float32)
    convert(tmp_path / "in", tmp_path / "out", quant=format)
    load(tmp_path / "in", quant=format).save_pretrained(tmp_path / "saved")
    found, saved = load(tmp_path / "out"), load(tmp_path / "saved")
    assert torch.equal(logits(found), logits(saved))
    assert error(logits(found), logits(load(tmp_path / "in"))) < 0.1
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "progress": False}
    floats = streamload.load_state_dict(None, tmp_path / "out", **options).state_dict
    for name, parameter in load(tmp_path / "in").named_parameters():
        assert error(floats[name], parameter.detach()) < 0.15, name  # as Conv1D has it
    assert streamload.diff(tmp_path / "in", tmp_path / "out", quant=format, progress=False).ok


MAMBA = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "state_size": 8}


def test_weights_that_a_model_reads(tmp_path: Path) -> None:
    """Mamba multiplies by a module's weight, which those of streamload have, and no others."""
    config = transformers.MambaConfig(**MAMBA)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", quant="nf4")
    assert said_in(tmp_path / "out")["quant_method"] == "streamload"
    assert error(logits(load(tmp_path / "out")), logits(load(tmp_path / "in"))) < 0.2
    for format in ("int8", "bitsandbytes-int8"):
        with pytest.raises(ValueError, match=f"opens no {format} in this model"):
            convert(tmp_path / "in", tmp_path / format, quant=format)
        assert not (tmp_path / format).exists()


def test_what_does_not_compute_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model computes two tokens first, unless the source's does not, either."""
    make(tmp_path / "in", "Llama", torch.float32)
    forward = transformers.LlamaForCausalLM.forward

    def refuse(self: Any, *args: Any, **named: Any) -> Any:
        if always or hasattr(self.model.layers[0].mlp.up_proj, "operand"):
            raise RuntimeError("no such product")
        return forward(self, *args, **named)

    always = False
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", refuse)
    with pytest.raises(CheckpointError, match=r"not published: its model does not compute: no"):
        convert(tmp_path / "in", tmp_path / "out", quant="q8_0")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".streamload"]
    always = True
    convert(tmp_path / "in", tmp_path / "other", quant="q8_0")


def test_another_process_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is a line of JSON; without room for it, a note says that nobody was asked."""
    make(tmp_path / "in", "Mixtral")
    checkpoint = streamload.open_checkpoint(tmp_path / "in")
    wanted = [name for name in checkpoint.tensors if "proj" in name or "experts" in name]
    formats = dict.fromkeys(wanted, "nf4")
    question = {"path": str(tmp_path / "in"), "formats": formats, "packed": []}
    lines = json.dumps({"question": "holding", **question}) + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    openable.answer(out := io.StringIO())
    found = json.loads(out.getvalue())
    policy = QuantPolicy.parse({**formats, "*": None})
    judging = openable.Judging()
    expected = openable.asked_of_models(checkpoint, policy, judging)
    assert expected is not None
    assert (found["left"], found["modules"]) == (expected.left, expected.modules)
    monkeypatch.setattr(openable, "_is_imported", lambda: False)
    monkeypatch.setattr(openable, "_CHILD_NBYTES", 2**60)
    verdict = openable.asked_of_models(checkpoint, policy, judging)
    assert verdict is not None and not verdict.left
    assert "transformers was not asked what it opens: it takes" in verdict.notes[0]
    assert judging.why_not_opened(tmp_path / "in", tmp_path) == ""


def test_it_goes_on_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal has the answer; without it, and for other options, it is refused."""
    make(tmp_path / "in", "Mixtral")
    convert(tmp_path / "in", tmp_path / "whole", quant="q8_0")

    def stop(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    for name in ("out", "old"):
        with pytest.raises(KeyboardInterrupt):
            streamload.convert(tmp_path / "in", tmp_path / name, quant="q8_0", progress=stop)
    monkeypatch.setattr(openable, "_is_imported", lambda: False)
    monkeypatch.setattr(openable, "_CHILD_NBYTES", 2**60)
    with pytest.raises(CheckpointError, match="another option 'quant'"):
        convert(tmp_path / "in", tmp_path / "out", quant="q4_0", resume=True)
    convert(tmp_path / "in", tmp_path / "out", quant="q8_0", resume=True)
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("*.*")}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.*")} == files
    journal = tmp_path / "old" / ".streamload" / "journal"
    journal.write_text(journal.read_text().replace('"verdict": {', '"verdict of": {'))
    with pytest.raises(CheckpointError, match="another option 'left'"):
        convert(tmp_path / "in", tmp_path / "old", quant="q8_0", resume=True)


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Path) -> None:
    """A process that has not imported transformers asks another one."""
    make(tmp_path / "in", "Mixtral")
    falcon(tmp_path / "falcon")
    base = [sys.executable, "-m", "streamload", "convert"]
    for name, code, says in (("in", 0, "not quantised, 24 tensors"), ("falcon", 2, "FalconLinear")):
        command = [*base, str(tmp_path / name), str(tmp_path / f"{name}-out"), "--quant", "q8_0"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, says in done.stdout + done.stderr) == (code, True), done.stderr
    assert error(logits(load(tmp_path / "in-out")), logits(load(tmp_path / "in"))) < 0.02


ECHO = 'import sys\nfor line in sys.stdin: print(\'{"why": "none"}\', flush=True)'


def test_one_child_answers_all_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for more of them, but not in little memory, and is gone afterwards."""
    monkeypatch.setattr(openable, "_is_imported", lambda: False)
    monkeypatch.setattr(openable, "_CODE", ECHO)
    monkeypatch.setattr(openable, "_CHILD_NBYTES", 1)
    for kept_nbytes, count in ((1, 1), (2**60, 2)):
        monkeypatch.setattr(openable, "_KEPT_NBYTES", kept_nbytes)
        started: list[subprocess.Popen[bytes]] = []

        def start(*given: Any, _started: Any = started, **options: Any) -> Any:
            _started.append(POPEN(*given, **options))
            return _started[-1]

        monkeypatch.setattr(subprocess, "Popen", start)
        with openable.Judging() as judging:
            assert [judging.why_not_opened(tmp_path, tmp_path) for _ in range(2)] == ["none"] * 2
            assert started[-1].poll() is None or kept_nbytes > 1
        assert len(started) == count
        assert all(process.returncode is not None for process in started)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import time; time.sleep(60)", "no answer in 0.5 s"),
        ("raise SystemExit('it has no torch')", "it has no torch"),
        ("raise SystemExit(7)", "exit 7"),
        ("input(); raise KeyError('x')", "KeyError: 'x'"),
    ],
)
def test_a_child_that_does_not_answer(
    code: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last line says why, and the next question begins another child."""
    monkeypatch.setattr(openable, "_is_imported", lambda: False)
    monkeypatch.setattr(openable, "_CODE", code)
    monkeypatch.setattr(openable, "_CHILD_NBYTES", 1)
    monkeypatch.setattr(openable, "_TIMEOUT_S", 0.5 if "sleep" in code else 60.0)
    with openable.Judging() as judging:
        for _ in range(2):
            assert judging.ask("holding", path="x" * 2**17) == said
