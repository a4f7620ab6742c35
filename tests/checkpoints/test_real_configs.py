"""Published `config.json` files, as people have them: each is translated, or refused for the right reason."""

import json
import re
from typing import Any

import pytest

from model.checkpoints.families import FAMILIES, translate
from model.network.parameters import count_parameters
from tests.conftest import SHARED, shared

# The number of parameters of the network that each config describes. Those of the published models are the numbers
# that their publishers state.
SIZES = {
    "gemma2--kevinstephano_thunder_model_blocks-google-gemma-2-9b-it": 9_241_705_984,
    "gpt2--AshiqAbdulkhader_GPT2-Poet-models": 124_439_808,
    "gpt2--MahenderGoud987_fine-tune-fine_tuned_gpt2": 124_439_808,
    "gpt2--crurp_quantumbench-llm-gpt2-large": 774_030_080,
    "gpt2--crurp_quantumbench-llm-gpt2": 124_439_808,
    "gpt2--gopu-inc_agentV1-checkpoint-20": 124_439_808,
    "gpt2--gpt2-xl-printed-fs15339100425": 1_557_611_200,
    "gpt2--lolMANFREDI04_prova_modello_ia_chatGPT2-gpt2-finetuned": 124_440_576,
    "gpt2--xu737_PeFAD-gpt2-l": 774_030_080,
    "gpt_neox--h2ogpt-oasst1-512-12b-fs60420227314": 11_846_072_320,
    "granite--granite-3.3-8b-instruct-fs61558565367": 8_170_864_640,
    "llama--DannyMeb_iShrink-LLM-Compression-Framework-pruned_model-3": 2_895_350_784,
    "llama--DannyMeb_iShrink-LLM-Compression-Framework-pruned_model": 1_114_900_480,
    "llama--Hypoxiic_Vicuna-7b-fine-tune-summarisation-Vicuna-7b-fine-tuned-lora-params": 6_738_415_616,
    "llama--NT3RN_BanglaLLM-final_model": 51_651_072,
    "llama--SmolLM2-1.7B-Instruct-fs61558565367": 1_711_376_384,
    "llama--SmolLM2-135M-fs11598493191": 134_515_008,
    "llama--dujh22_mistral-7b-mistral-7B-sft": 7_241_732_096,
    "llama--intel_xFasterTransformer-llama-3-70b": 70_553_706_496,
    "llama--kevinstephano_thunder_model_blocks-meta-llama-Meta-Llama-3-8B-Instruct": 8_030_261_248,
    "llama--meta-llama--Meta-Llama-3.1-405B": 405_853_388_800,
    "llama--meta-llama--Meta-Llama-3.1-70B": 70_553_706_496,
    "llama--satyasundar_erav3-s13-SmolLM2-135M-printed": 134_515_008,
    "llama--sophgo_LLM-TPU-Llama3": 3_212_749_824,
    "llama--sophgo_LLM-TPU-Megrez-3B-Instruct": 2_915_207_680,
    "llama--sophgo_LLM-TPU-Yi-6B-Chat": 6_061_035_520,
    "mistral--AhmedA1559_maistrl-model": 34_871_472,
    "mistral--Mistral-7B-Instruct-v0.1-fs67105842618": 7_241_732_096,
    "mistral--sophgo_LLM-TPU-Mistral-7B-Instruct-v0.2": 7_241_732_096,
    "mixtral--mistralai--Mixtral-8x22B-v0.1": 140_620_634_112,
    "mixtral--mistralai--Mixtral-8x7B-v0.1": 46_702_792_704,
    "olmo2--OLMo-2-1124-7B-Instruct-fs61558565367": 7_298_617_344,
    "phi3--gopu-inc_agentV1": 3_821_079_552,
    "qwen2--Qwen2.5-0.5B-base-fs54197735156": 494_032_768,
    "qwen2--Qwen2.5-1.5B-tf5.17-fs68870418900": 1_543_714_304,
    "qwen2--citsjtu2020_LLM-Prof-h2048-l36": 3_085_938_688,
    "qwen2--citsjtu2020_LLM-Prof-h5120-l64": 32_763_876_352,
    "qwen2--infinityarpan_qwen-25-api-Qwen2.5-0.5B-Instruct": 494_032_768,
    "qwen2--intel_xFasterTransformer-qwen2-14b": 14_770_033_664,
    "qwen2--intel_xFasterTransformer-qwen2-4b": 3_950_369_280,
    "qwen2--intel_xFasterTransformer-qwen2-7b": 7_615_616_512,
    "qwen2--sophgo_LLM-TPU-Qwen2-1.5B-Instruct": 1_543_714_304,
    "qwen2--sophgo_LLM-TPU-Qwen2-72B-Instruct": 72_706_203_648,
    "qwen3--Qwen--Qwen3-32B": 32_762_123_264,
    "qwen3--Qwen--Qwen3-8B": 8_190_735_360,
    "qwen3--akougkas_warpio-cli-h2560-l36": 4_022_468_096,
    "qwen3--citsjtu2020_LLM-Prof-h2560-l36": 4_022_468_096,
    "qwen3--intel_xFasterTransformer-qwen3-0.6b": 596_049_920,
    "qwen3--intel_xFasterTransformer-qwen3-14b": 14_768_307_200,
    "qwen3_moe--Qwen--Qwen3-30B-A3B": 30_532_122_624,
    "stablelm--reduced-intel_intel-extension-for-pytorch-stablelm": 462_440_448,
}
# The weights of these are stored in a format of another program.
QUANTIZED = {
    "llama--Billy19191_OP-GPT-Discord-Bot-model": "'gptq'",
    "llama--IrfanUruchi_Llama-3.2-1B-ComputerEngineeringLLM": "'bitsandbytes'",
    "qwen3--DeadByDawn101_RavenX-Sec-mlx_model": "{'bits': 4, 'group_size': 64, 'mode': 'affine'}",
    "qwen3_moe--Qwen--Qwen3-30B-A3B-FP8": "'fp8' ('e4m3')",
}
# The family, the part of the name before "--", is unknown.
UNKNOWN = (
    "bloom--Peterpetu_Large-Language-Model-Fine-Tuning-with-QLora-merged_model",
    "bloom--reduced-intel_intel-extension-for-pytorch-bloom",
    "chatglm--sophgo_LLM-TPU-chatglm2-6b",
    "chatglm--sophgo_LLM-TPU-glm-4-9b-chat",
    "deepseek_v2--kvcache-ai_ktransformers-model_config",
    "deepseek_v3--deepseek-ai--DeepSeek-R1",
    "deepseek_v3--intel_xFasterTransformer-deepseek-r1",
    "deepseek_v3--nvidia--DeepSeek-V3.1-NVFP4",
    "deepseek_v32--deepseek-ai--DeepSeek-V3.2",
    "deepseek_v32--nvidia--DeepSeek-V3.2-NVFP4",
    "deepseek_v4--deepseek-ai--DeepSeek-V4-Flash",
    "deepseek_v4--deepseek-ai--DeepSeek-V4-Pro",
    "deepseek_v4--nvidia--DeepSeek-V4-Flash-NVFP4",
    "deepseek_v4--nvidia--DeepSeek-V4-Pro-NVFP4",
    "falcon--intel_intel-extension-for-pytorch-tiiuae_falcon-40b_",
    "falcon--reduced-intel_intel-extension-for-pytorch-falcon-7b",
    "glm4_moe--alibaba_rtp-llm-tokenizer",
    "glm_moe_dsa--nvidia--GLM-5.1-NVFP4",
    "hunyuan_v1_dense--swayam8624_nanoquant-private-tencent_Hunyuan-MT-7B_heavy",
    "mimo_v2_flash--XiaomiMiMo--MiMo-V2-Flash",
    "minicpm--sophgo_LLM-TPU-MiniCPM4",
    "minimax_m2--MiniMaxAI--MiniMax-M2.5",
    "minimax_m2--MiniMaxAI--MiniMax-M2.7",
    "minimax_m2--nvidia--MiniMax-M2.7-NVFP4",
    "mpt--reduced-intel_intel-extension-for-pytorch-mpt",
    "nemotron_h--nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
    "nemotron_h--nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4",
    "opt--opt-6.7b-fs44347156050",
    "opt--reduced-intel_intel-extension-for-pytorch-opt",
    "qwen--jiahe7ay_MINI_LLM-qwen",
    "qwen--sophgo_LLM-TPU-CodeFuse-DevOps-Model-7B-Chat",
    "step3p7--stepfun-ai--Step-3.7-Flash-FP8",
    "step3p7--stepfun-ai--Step-3.7-Flash",
)


def read(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(shared(f"configs/{name}.json").read_text())
    return config


def test_an_outcome_is_expected_of_every_config() -> None:
    shared("configs")
    names = {path.name.removesuffix(".json") for path in (SHARED / "configs").glob("*.json")}
    assert names == {*SIZES, *QUANTIZED, *UNKNOWN}
    assert len(names) == len(SIZES) + len(QUANTIZED) + len(UNKNOWN) == 88


@pytest.mark.parametrize("name", SIZES)
def test_a_config_of_a_known_family_describes_a_network_of_the_published_size(name: str) -> None:
    config = read(name)
    family, translated = translate(config)
    assert family.model_type == config["model_type"]
    assert count_parameters(translated).total == SIZES[name]


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_refused_and_their_scheme_is_named(name: str) -> None:
    message = f"config.json: quantization_config: weights quantized with {QUANTIZED[name]} are not implemented; use a"
    with pytest.raises(ValueError, match=re.escape(message)):
        translate(read(name))


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_family_is_refused_and_the_known_ones_are_listed(name: str) -> None:
    model_type = name.split("--")[0]
    message = f"config.json: model_type '{model_type}' is not implemented"
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        translate(read(name))
    assert str(error.value).endswith(f"; known: {', '.join(FAMILIES)}")
    assert "meant?" not in str(error.value)


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 71,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
# Configs of multimodal models have that of their text model in them.
LLAVA = {"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt-neox"}, "model_type 'gpt-neox' is not implemented (is 'gpt_neox' meant?); known: gpt2,"),
        ({"model_type": "Llama"}, "model_type 'Llama' is not implemented (is 'llama' meant?); known: gpt2,"),
        ({"model_type": "mistrl"}, "model_type 'mistrl' is not implemented (is 'mistral' meant?); known: gpt2,"),
        ({"model_type": "granitemoe"}, "model_type 'granitemoe' is not implemented; known: gpt2,"),
        ({"model_type": None}, "model_type None is not implemented; known: gpt2,"),
        (LLAVA, "it is more than a text model; use a checkpoint of its text model alone (model_type 'llama'); known"),
        (LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4}}, "weights quantized with 'awq'"),
        (LLAMA | {"quantization_config": {"quant_method": "mxfp4"}}, "weights quantized with 'mxfp4'"),
        (LLAMA | {"quantization_config": {}}, "quantization_config: weights quantized with {}"),
        (
            LLAMA | {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
            "weights quantized with 'compressed-tensors' ('float-quantized') are not implemented",
        ),
        (LLAMA | {"compression_config": {"format": "int-quantized"}}, "compression_config: weights quantized with"),
        (LLAMA | {"quantization": {"bits": 4, "group_size": 64}}, "quantization: weights quantized with"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM"),
        (LLAMA | {"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu' is not implemented"),
    ],
    ids=str,
)
def test_an_error_says_what_is_not_implemented(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        translate(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["LLaMAForCausalLM"]},
        {"architectures": None},
        {"quantization_config": None},
        {"_model_name_or_path": "x", "line_by_line": False},
        {"sequence_parallel_enabled": False, "selective_checkpoint_enabled": False},
        {"max_sequence_length": 2048},
    ],
    ids=str,
)
def test_keys_without_an_effect_are_accepted(changes: dict[str, Any]) -> None:
    assert translate(LLAMA | changes)[1] == translate(LLAMA)[1]


def test_a_missing_key_has_the_default_of_transformers() -> None:
    del (config := dict(LLAMA))["max_position_embeddings"]
    assert translate(config)[1].max_positions == 2048
    assert translate(config | {"max_sequence_length": 512})[1].max_positions == 512
    mistral = config | {"model_type": "mistral", "architectures": None, "hidden_size": 32, "num_attention_heads": 16}
    translated = translate(mistral)[1]
    assert (translated.max_positions, translated.num_kv_heads, translated.window) == (131072, 8, 4096)
    assert translate(mistral | {"num_key_value_heads": None})[1].num_kv_heads == 16
