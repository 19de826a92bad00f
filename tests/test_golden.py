"""Whole answers against references from elsewhere: a story model's golden text, recorded tokens, `transformers`."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
from pathlib import Path

import gguf
import jax
import pytest

import ca_jax
from ca_jax.errors import UnknownModelError
from ca_jax.models import cpu_kernels
from ca_jax.models.checkpoint import PRESETS
from ca_jax.models.transformer import Transformer
from ca_jax.pretrained import LoadedModel
from ca_jax.private.gguf_reader import Reader
from ca_jax.turns.requests import SamplingParams
from tests import engine_kit as kit

PRESET = "smollm2-135m-instruct"
SIZES = {"max_batch_size": 1, "context_window": 256, "save_group_tokens": 16}


def test_the_story_model_tells_its_golden_text_at_once_and_in_turns(shared_data):
    """From GGUF and from the same weights as a Hugging Face directory, which has no tokenizer."""
    weights = {form: shared_data / "models" / f"stories260K{form}" for form in (".gguf", "_hf")}
    written = shared_data / "refs" / "stories260K_golden.json"
    missing = [str(path) for path in (*weights.values(), written) if not path.exists()]
    if missing:
        pytest.skip(f"wants {missing}, which is not there")
    golden = json.loads(written.read_text(encoding="utf-8"))
    steps, expected = golden["steps"], None
    for form, path in weights.items():
        with kit.small_engine(ca_jax.load_model(str(path), dtype="float32"), **SIZES) as engine:
            prompt = golden["prompt"] if form == ".gguf" else [1]
            (told,) = engine.generate([prompt], SamplingParams(max_tokens=steps, ignore_eos=True))
            expected = expected or told.token_ids
            assert len(told.token_ids) == steps
            assert told.token_ids == expected
            assert told.text == (golden["expected_text"] if form == ".gguf" else "")
            session = engine.session()
            for start in range(-1, steps - 1, 40):  # Each sends a golden token and is answered with those behind it.
                sent, stop = [1] if start < 0 else [expected[start]], min(start + 40, steps)
                kit.say(session, sent, stop - start - 1, sampling=SamplingParams(ignore_eos=True))
                assert session.token_ids == [1, *expected[:stop]]
                assert session.usage.num_cached_tokens == max(start, 0)


@pytest.fixture(params=["cpu kernels", "xla"])
def computed_by(request, monkeypatch):
    """By what a CPU computes attention and products of few rows."""
    if request.param == "cpu kernels" and cpu_kernels.library() is None:
        pytest.skip("the package was built without its CPU kernels")
    if request.param == "xla":
        monkeypatch.setattr(cpu_kernels, "library", lambda: None)
        jax.clear_caches()  # Which it is is decided when a function is traced.
    yield request.param
    if request.param == "xla":
        jax.clear_caches()


class WithoutTokenizer(Reader):
    """What the package's reader finds of weights, without 98,000 strings of a tokenizer."""

    _build_tensors = gguf.GGUFReader._build_tensors

    def _build_fields(self, *args):
        end = super()._build_fields(*args)
        for name in [name for name in self.fields if name.startswith("tokenizer.")]:
            del self.fields[name]
        return end


@pytest.fixture(scope="module")
def loaded():
    """The default model here and in `transformers`, read from the same file.

    transformers' own `from_pretrained` would want one package more.
    """
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        model = ca_jax.load_model(PRESET, dtype="float32")
    except UnknownModelError as error:
        pytest.skip(str(error))
    package = importlib.util.find_spec(PRESETS[PRESET].package)
    path = str(Path(package.submodule_search_locations[0]) / PRESETS[PRESET].filename)
    with pytest.MonkeyPatch.context() as patch:
        # It reads the file twice, and makes the table 397 times.
        patch.setattr(gguf, "GGUFReader", functools.cache(WithoutTokenizer))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**load_gguf_checkpoint(path)["config"]))
        tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=reference)["tensors"]
    missing, unexpected = reference.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], []), "all but the tied head is in the file"
    reference.tie_weights()
    return model, reference.eval()


def first_layers(model: LoadedModel, num_layers: int) -> LoadedModel:
    """A model that ends behind its first layers."""
    config = dataclasses.replace(model.config, num_layers=num_layers)
    rest = {f"layer_{i}" for i in range(num_layers, model.config.num_layers)}
    params = {"params": {name: part for name, part in model.params["params"].items() if name not in rest}}
    return dataclasses.replace(
        model, config=config, model=Transformer(config), params=params, fingerprint=f"{num_layers} layers"
    )


def test_the_default_model_answers_a_chat_as_transformers_does_from_the_same_file(loaded, computed_by, monkeypatch):
    """Two turns, the second over stored KV; how the text becomes tokens is compared where tokenizers are tested.

    By what XLA compiles, its first layers alone: compiling all of them takes a quarter of a minute.
    """
    import torch

    model, reference = loaded
    if computed_by == "xla":
        model = first_layers(model, 4)
        monkeypatch.setattr(reference.model, "layers", reference.model.layers[:4])
    with kit.small_engine(model, **SIZES) as engine:
        session = engine.session(system="Answer briefly.")
        for question in ("Name a river in Germany.", "Which cities lie on it?"):
            num_known = len(session.token_ids)
            answer = kit.say(session, question, 8)
            prompt = session.token_ids[: session.usage.prompt_tokens]
            assert session.usage.num_cached_tokens == max(num_known - 1, 0)
            out = reference.generate(
                torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=list(model.stop_token_ids)
            )
            assert answer == out[0, len(prompt) :].tolist()
