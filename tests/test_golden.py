"""Whole answers against references from elsewhere: a story model's golden text, recorded tokens, `transformers`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import ca_jax
from ca_jax.config import EngineConfig
from ca_jax.errors import UnknownModelError
from ca_jax.models.checkpoint import PRESETS
from ca_jax.storage.config import StoreConfig
from ca_jax.turns.requests import SamplingParams
from tests import engine_kit as kit

CONFIG = EngineConfig(
    dtype="float32",
    max_batch_size=1,
    context_window=256,
    prefill_chunk_tokens=64,
    save_group_tokens=16,
    compile_cache_dir=None,
    store=StoreConfig(dram_gib=0.05, block_tokens=16),
)
PRESET = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def stories(shared_data) -> dict[str, Path]:
    """The story model in both forms, or a skip."""
    files = {form: shared_data / "models" / f"stories260K{form}" for form in (".gguf", "_hf")}
    missing = [str(path) for path in files.values() if not path.exists()]
    if missing:
        pytest.skip(f"wants {missing}, which is not there")
    return files


@pytest.fixture(scope="module")
def golden(shared_data) -> dict[str, object]:
    """`expected_text` of `steps` greedy steps behind the beginning-of-text token."""
    path = shared_data / "refs" / "stories260K_golden.json"
    if not path.is_file():
        pytest.skip(f"wants {path}, which is not there")
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def story(stories, golden) -> tuple[list[int], str]:
    """Tokens and text that the GGUF form gives in one answer."""
    with ca_jax.Engine.from_pretrained(str(stories[".gguf"]), CONFIG) as engine:
        (answer,) = engine.generate([golden["prompt"]], SamplingParams(max_tokens=golden["steps"], ignore_eos=True))
    return answer.token_ids, answer.text


def test_the_story_model_tells_its_golden_text(story, golden):
    token_ids, text = story
    assert len(token_ids) == golden["steps"]
    assert text == golden["expected_text"]


def test_the_same_weights_as_a_hugging_face_directory_give_the_same_tokens(stories, story, golden):
    with ca_jax.Engine.from_pretrained(str(stories["_hf"]), CONFIG) as engine:
        (answer,) = engine.generate([[1]], SamplingParams(max_tokens=golden["steps"], ignore_eos=True))
    assert answer.token_ids == story[0]
    assert answer.text == "", "that directory has no tokenizer"


@pytest.mark.parametrize("form", [".gguf", "_hf"])
def test_the_golden_text_comes_in_turns_over_stored_kv_too(stories, story, form):
    """Each turn sends the next golden token and is answered with the 39 behind it."""
    expected, _ = story
    with ca_jax.Engine.from_pretrained(str(stories[form]), CONFIG) as engine:
        session = engine.session()
        for start in range(-1, len(expected) - 1, 40):
            sent = [1] if start < 0 else [expected[start]]
            stop = min(start + 40, len(expected))
            for _ in session.send_ids(sent, max_tokens=stop - start - 1, sampling=SamplingParams(ignore_eos=True)):
                pass
            assert session.token_ids == [1, *expected[:stop]]
            assert session.usage.num_cached_tokens == max(start, 0)


@pytest.mark.parametrize("name", ["gqa_llama3_rope", "gqa_linear_rope"])
def test_the_engine_generates_the_recorded_tokens(recorded_data, name):
    """Prefill and decode by the engine, for both kinds of rope scaling; a job for each prompt at once."""
    directory = recorded_data / f"llama_{name}"
    recorded = json.loads((directory / "expected_greedy.json").read_text(encoding="utf-8"))
    with ca_jax.Engine(ca_jax.load_model(str(directory), dtype="float32"), CONFIG) as engine:
        answers = engine.generate(
            [case["prompt"] for case in recorded["cases"]],
            SamplingParams(max_tokens=recorded["max_new_tokens"], ignore_eos=True),
        )
    assert [answer.token_ids for answer in answers] == [case["token_ids"] for case in recorded["cases"]]


def gguf_in_transformers(path: Path):
    """The model of a GGUF file, read by `transformers`; its `from_pretrained` would want one package more."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.LlamaConfig(**load_gguf_checkpoint(str(path))["config"])
    model = transformers.LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], []), "all but the tied head is in the file"
    model.tie_weights()
    return model.eval()


def test_the_default_model_answers_a_chat_as_transformers_does_from_the_same_file():
    """Three turns over stored KV; how the text becomes tokens is compared where tokenizers are tested."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    try:
        model = ca_jax.load_model(PRESET, dtype="float32")
    except UnknownModelError as error:
        pytest.skip(str(error))
    package = importlib.util.find_spec(PRESETS[PRESET].package)
    reference = gguf_in_transformers(Path(package.submodule_search_locations[0]) / PRESETS[PRESET].filename)
    with ca_jax.Engine(model, CONFIG) as engine:
        session = engine.session(system="Answer briefly.")
        for question in ("Name a river in Germany.", "Which cities lie on it?", "Write it backwards."):
            num_known = len(session.token_ids)
            answer = kit.say(session, question, 24)
            prompt = session.token_ids[: session.usage.prompt_tokens]
            assert session.usage.num_cached_tokens == max(num_known - 1, 0)
            out = reference.generate(
                torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=list(model.stop_token_ids)
            )
            assert answer == out[0, len(prompt) :].tolist()
