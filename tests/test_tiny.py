"""The tiny models: their tree, their Hugging Face form, and the byte tokenizer."""

import json

import numpy as np
import pytest
import safetensors.numpy

from ca_jax.testing import tiny

CONFIG = tiny.tiny_config(vocab_size=260, num_kv_heads=1, head_dim=10)


def test_params_depend_on_the_seed_alone_and_tied_embeddings_have_no_head():
    def query_weights(seed, dtype=np.float32):
        return tiny.tiny_params(CONFIG, seed, dtype)["params"]["layer_2"]["attn"]["wq"]

    np.testing.assert_array_equal(query_weights(3), query_weights(3))
    assert not np.array_equal(query_weights(3), query_weights(4))
    np.testing.assert_array_equal(query_weights(3, np.float16), query_weights(3).astype(np.float16))
    config = tiny.tiny_config(tie_embeddings=True)
    assert "lm_head.weight" not in tiny.hf_tensors(config, tiny.tiny_params(config))


def test_hf_weights_compute_the_same_projections(tmp_path):
    params = tiny.tiny_params(CONFIG)
    tiny.write_tiny_hf(tmp_path, CONFIG, params)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    attn = params["params"]["layer_1"]["attn"]
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    queries = np.einsum("tf,fnh->tnh", x, attn["wq"])
    hf_queries = x @ tensors["model.layers.1.self_attn.q_proj.weight"].T
    np.testing.assert_allclose(hf_queries, queries.reshape(5, 40), atol=1e-5)
    hf_out = queries.reshape(5, 40) @ tensors["model.layers.1.self_attn.o_proj.weight"].T
    np.testing.assert_allclose(hf_out, np.einsum("tnh,nhf->tf", queries, attn["wo"]), atol=1e-4)
    assert json.loads((tmp_path / "config.json").read_text())["num_key_value_heads"] == 1


def test_a_token_is_a_byte_and_special_tokens_are_one_each():
    tokenizer = tiny.byte_tokenizer()
    text = "añ\t\x00 😀\n"
    assert tokenizer.get_vocab_size() == 256
    assert tokenizer.encode(text).ids == list(text.encode())
    marked = f"<|im_start|>{text}<|im_end|><|endoftext|>"
    assert tokenizer.encode(marked).ids == [tiny.IM_START_ID, *text.encode(), tiny.IM_END_ID, tiny.END_OF_TEXT_ID]
    assert tokenizer.decode(tokenizer.encode(marked).ids) == text
    assert tokenizer.decode(tokenizer.encode(marked).ids, skip_special_tokens=False) == marked


def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path):
    config = tiny.tiny_config(vocab_size=100)
    with pytest.raises(ValueError, match="must be at least 256, got 100"):
        tiny.write_tiny_hf(tmp_path, config, tiny.tiny_params(config))
    assert not list(tmp_path.iterdir())


def test_transformers_loads_the_directory(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    tiny.write_tiny_hf(tmp_path, CONFIG, tiny.tiny_params(CONFIG))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 260)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "é"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(rendered, add_special_tokens=False).input_ids == tiny.byte_tokenizer().encode(rendered).ids
