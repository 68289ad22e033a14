"""Models whose attention cannot be chosen compute with "pkg" what they do with "eager"."""

from __future__ import annotations

import importlib
import importlib.util
import re
import types
import warnings
from typing import Any

import pytest
import torch

import pkg
from pkg.integrations import _masks_of_models

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs transformers: pip install 'pkg-kernels[transformers]'",
)
WITH_DECODER = {
    "vocab_size": 101,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "pad_token_id": 1,
}
ENCODER = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
# transformers refuses "sdpa" for each of them. Those with a decoder call the attention that is
# chosen, and have no future hidden but by their mask; the others attend in code of their own.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomModel", {"vocab_size": 101, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "mpt": ("MptModel", {"vocab_size": 101, "d_model": 64, "n_heads": 4, "n_layers": 2}),
    "mpnet": ("MPNetModel", ENCODER),
    "roformer": ("RoFormerModel", ENCODER),
    "nllb_moe": ("NllbMoeModel", {**WITH_DECODER, "num_experts": 2}),
    "pegasus_x": ("PegasusXModel", WITH_DECODER),
    "bigbird_pegasus": ("BigBirdPegasusModel", {**WITH_DECODER, "attention_type": "original_full"}),
}


def output_of(name: str, kind: str, padded: bool) -> torch.Tensor:
    package = importlib.import_module("transformers")
    model_name, arguments = MODELS[name]
    model_class = getattr(package, model_name, None)
    if model_class is None:
        pytest.skip(f"this transformers has no {model_name}")
    torch.manual_seed(0)
    model = model_class._from_config(
        model_class.config_class(**arguments), attn_implementation=kind
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    torch.manual_seed(1)
    given = {"input_ids": torch.randint(3, 100, (2, 12))}
    if padded:
        given["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
        given["attention_mask"][0, -4:] = 0
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.randint(3, 100, (2, 7))
    with torch.no_grad():
        output: torch.Tensor = model(**given)[0]
    return output[:, :8]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_eager(name: str, padded: bool) -> None:
    pkg.integrations.transformers.register()
    expected = output_of(name, "eager", padded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = output_of(name, "pkg", padded)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_warning_names_the_models_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pkg.integrations.transformers.register()
    monkeypatch.setattr(_masks_of_models, "_can_be_chosen", {})
    with pytest.warns(UserWarning, match=r"BloomConfig \(.*BloomModel.*\) not all say"):
        output_of("bloom", "pkg", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output_of("bloom", "pkg", True)


def test_models_that_say_so_get_masks_of_sdpa() -> None:
    """All that transformers itself lets be chosen, and those that have soft caps or sinks."""
    package = importlib.import_module("transformers")
    for name in ("Llama", "GPT2", "Bert", "Whisper", "Gemma2", "GptOss"):
        config = getattr(package, f"{name}Config", None)
        if config is None:
            continue  # in none so old
        importlib.import_module(re.sub("configuration", "modeling", config.__module__))
        assert _masks_of_models._can_choose(config), name
        derived = types.new_class("Derived", (config,))
        assert _masks_of_models._can_choose(derived), name


def test_a_mask_without_a_configuration_means_the_same_to_every_attention() -> None:
    pkg.integrations.transformers.register()
    masking = importlib.import_module("transformers.masking_utils")
    make = masking.AttentionMaskInterface()["pkg"]
    given = {"batch_size": 1, "kv_length": 3, "q_length": 3}
    if "cache_position" in masking.sdpa_mask.__code__.co_varnames:
        given = {"batch_size": 1, "kv_length": 3, "cache_position": torch.arange(3)}
    mask = make(**given, dtype=torch.float32)
    assert mask.dtype == torch.float32
    assert (mask[0, 0] == 0).tolist() == torch.ones(3, 3).tril().bool().tolist()
