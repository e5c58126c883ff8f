"""Settings: defaults, every kind of value, errors that name what was given, and the documentation's table."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import warnings

import pytest

from deepinfer.settings import WITHOUT_EFFECT, Settings, parse_token_ranges, table
from tests.support.paths import ROOT

# Every variable of the original release, written down by hand from its documentation.
ORIGINAL = """
ACCELERATOR COMPUTE_SUM_SMALLER_PROBS JIT_CACHE_DIR NCCL_NUM_SMS USERBUFFER_COMM_SMS GLOO_TIMEOUT
REARRANGE_P2P_GROUPS OVERRIDE_NUM_EXTRA_EXPERTS EXPERT_COUNT_WINDOW_SIZE EXPERT_REARRANGEMENT_STEP_INTERVAL
REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE MOE_LB_STAT_INTERVAL FORCE_IMBALANCE_RATIO FORCE_LOAD_BALANCE
SHOW_EPLB_DETAIL PREFILL_MAX_SUM_SEQLEN_K INDEX_ATTN_MEMORY_LIMIT USE_NEXTN_DECODE ENABLE_MTP_VARLEN
MAX_BACKTRACKING_TOKENS DFLASH_CONFIDENCE_HEAD_TEMPERATURE ENGRAM_PAD_TOKEN ENGRAM_FORCE_GPU_STORAGE
SAMPLER_FORCE_TOPK DECODE_TOKEN_BLACKLIST ENFORCE_EAGER CUDAGRAPH_BATCH_SIZE_INTERVAL DFLASH_ENFORCE_EAGER
DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL DECODE_PERF_CACHE_DIR DECODE_PERF_CACHE_TTL_SEC NUM_STATE_SLOTS_RATIO
PREFILL_STORE_EXTRA_STATE PREFILL_STORE_EXTRA_SIZE XGRAMMAR_DEBUG XGRAMMAR_TIMEOUT XGRAMMAR_DISABLE_CACHE
XGRAMMAR_CACHE_LIMIT_BYTES SO_BUILDER_CPUS PREFILL_ATTEMPT_INTERVAL PREFILL_ANY_ATTEMPT_INTERVAL
ZERO_OVERHEAD_SCHEDULING LOGGING_INTERVAL_STEP NCCL_MEMORY_SAMPLE_INTERVAL_STEPS RINGBUFFER_WARNING_INTERVAL
GC_INTERVAL_STEP YOCO_PREFILL_TRUNCATION_MODE YOCO_PREFILL_KEEP_TOKENS BATCH_INVARIANT DISABLE_SYNC_GUARD
PROFILE_TORCH_CUDA_MEMORY ENABLE_MEMORY_TRACING PROFILE_HTTP_ENABLE PROFILE_HTTP_PORT_BASE TORCH_PROFILER_DIR
USE_MULTIMODAL_POOL MULTIMODAL_POOL_SIZE_GB MULTI_MODAL_BUFFER_SIZE MULTI_MODAL_WORKER_TIMEOUT CPP_LOG_LEVEL
FUSED_SAMPLE_STRESS_TEST FUSED_SAMPLE_DETAIL_LOG HF_MODEL_DIR
""".split()


def read(**environ: str) -> Settings:
    return Settings.from_env({f"DEEPINFER_{name}": value for name, value in environ.items()})


def test_defaults():
    assert read() == Settings() == Settings.from_env({"PATH": "/bin", "DEEPINFERX": "1"})
    settings = read()
    assert settings.accelerator == "auto"
    assert settings.batch_invariant is None
    assert settings.num_draft_tokens == 5
    assert settings.num_state_slots_ratio == 1.2
    assert settings.logging_interval_steps == 100
    assert settings.decode_token_blacklist == ()
    assert settings.cpp_log_level == "info"


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEEPINFER_SAMPLER_FORCE_TOPK", "3")
    assert Settings.from_env().sampler_force_topk == 3


@pytest.mark.filterwarnings("ignore:without effect")
def test_every_kind_of_value():
    settings = read(
        ACCELERATOR="cpu",
        USE_NEXTN_DECODE="0",
        MAX_BACKTRACKING_TOKENS="9",
        NUM_STATE_SLOTS_RATIO="2.5",
        LOGGING_INTERVAL_STEP="-1",
        DECODE_TOKEN_BLACKLIST="0..3,7",
        DFLASH_CONFIDENCE_HEAD_TEMPERATURE="1.5, 2,0",
        HF_MODEL_DIR=" some/dir ",
        BATCH_INVARIANT="1",
        EXTERNAL_KERNELS="flash_mla, deep_gemm",
        CPP_LOG_LEVEL="off",
    )
    assert settings.accelerator == "cpu"
    assert settings.num_draft_tokens == 0
    assert settings.max_backtracking_tokens == 9
    assert settings.num_state_slots_ratio == 2.5
    assert settings.logging_interval_steps == -1
    assert settings.decode_token_blacklist == ((0, 3), (7, 7))
    assert settings.confidence_temperatures == (1.5, 2.0, 0.0)
    assert settings.hf_model_dir == "some/dir"
    assert settings.batch_invariant is True
    assert settings.cpp_log_level == "off"
    assert settings.external_kernels == ("flash_mla", "deep_gemm")


@pytest.mark.parametrize("text", ["0", "", "false", "False"])
def test_booleans_that_are_false(text: str):
    assert read(BATCH_INVARIANT=text).batch_invariant is False


@pytest.mark.parametrize("text", ["1", "true", "True", "yes", "no", "FALSE", "00"])
def test_booleans_that_are_true_as_in_the_original(text: str):
    assert read(BATCH_INVARIANT=text).batch_invariant is True


def test_an_empty_text_means_unset():
    assert read(USE_NEXTN_DECODE="", DECODE_TOKEN_BLACKLIST="", HF_MODEL_DIR="", ACCELERATOR="") == Settings()


@pytest.mark.parametrize(
    ("name", "value", "works"),
    [
        ("ACCELERATOR", "tpu", "one of auto, cpu, nvidia, ascend"),
        ("USE_NEXTN_DECODE", "five", "an integer >= 0"),
        ("USE_NEXTN_DECODE", "-1", "an integer >= 0"),
        ("USE_NEXTN_DECODE", "5.0", "an integer >= 0"),
        ("PREFILL_MAX_SUM_SEQLEN_K", "0", "an integer >= 1"),
        ("NUM_STATE_SLOTS_RATIO", "0.5", "a number >= 1"),
        ("NUM_STATE_SLOTS_RATIO", "nan", "a number >= 1"),
        ("NUM_STATE_SLOTS_RATIO", "inf", "a number >= 1"),
        ("LOGGING_INTERVAL_STEP", "often", "an integer"),
        ("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,", "a number >= 0, or several"),
        ("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,-1", "a number >= 0, or several"),
        ("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "nan", "a number >= 0, or several"),
        ("CPP_LOG_LEVEL", "INFO", "one of off, error, warn, info"),
        ("DECODE_TOKEN_BLACKLIST", "3,2", "increasing token ids"),
        ("EXTERNAL_KERNELS", "deepgemm", "some of deep_gemm, flash_mla, deep_select"),
        ("EXTERNAL_KERNELS", "flash_mla,flash_mla", "some of deep_gemm"),
    ],
)
def test_a_bad_value_names_variable_value_and_what_would_work(name: str, value: str, works: str):
    with pytest.raises(ValueError, match=f"^DEEPINFER_{name}=") as error:
        read(**{name: value})
    assert repr(value) in str(error.value)
    assert works in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_name_names_its_nearest_neighbour():
    with pytest.raises(
        ValueError, match=r"DEEPINFER_BATCH_INVARIENT .*nearest one is DEEPINFER_BATCH_INVARIANT$"
    ):
        read(BATCH_INVARIENT="1")
    with pytest.raises(
        ValueError, match=r"DEEPINFER_GC_INTERVAL .*nearest one is DEEPINFER_GC_INTERVAL_STEP$"
    ):
        read(GC_INTERVAL="1")
    with pytest.raises(ValueError, match="DEEPINFER_ is not a variable"):
        Settings.from_env({"DEEPINFER_": "1"})


def test_every_problem_is_reported_at_once():
    with pytest.raises(ValueError, match="one of auto") as error:
        read(ACCELERATOR="tpu", NEXTN="1", USE_NEXTN_DECODE="x", GC_INTERVAL_STEP="5")
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("5", ((5, 5),)),
        ("0..3,7,10..12", ((0, 3), (7, 7), (10, 12))),
        (" 1 , 2 ", ((1, 1), (2, 2))),
        ("4..4", ((4, 4),)),
    ],
)
def test_token_ranges(text: str, ranges: tuple):
    assert parse_token_ranges(text) == ranges


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "1,",
        "1,1",
        "2,1",
        "3..1",
        "1..3,3",
        "1..3,2..5",
        "-1",
        "a",
        "1..",
        "..3",
        "1...3",
        "1.5",
        "٣",
    ],
)
def test_token_ranges_that_are_refused(text: str):
    with pytest.raises(ValueError, match=r"token id|increasing"):
        parse_token_ranges(text)


OWN = (
    "FP8_PRODUCTS",
    "EXTERNAL_KERNELS",
    "KERNEL_LIBRARY",
    "XGRAMMAR_MEMORY_LIMIT_BYTES",
    "DISABLE_CORE_BINDING",
    "CUDAGRAPH_ON_DEMAND",
)


def test_every_variable_of_the_original_is_known():
    known = {field.metadata["name"] for field in dataclasses.fields(Settings)} | set(WITHOUT_EFFECT)
    own = {f"DEEPINFER_{name}" for name in OWN}
    assert known == {f"DEEPINFER_{name}" for name in ORIGINAL} | own
    assert len(ORIGINAL) == len(set(ORIGINAL))


def test_a_setting_that_has_no_effect_yet_warns_and_is_checked():
    with pytest.warns(UserWarning, match=r"CPP_LOG_LEVEL \(the native scheduler logs nothing\)"):
        assert read(CPP_LOG_LEVEL="warn").cpp_log_level == "warn"


def test_every_setting_with_an_effect_has_a_reader():
    readers = [*(ROOT / "deepinfer").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    text = "".join(path.read_text() for path in readers if path.name != "settings.py")
    for field in dataclasses.fields(Settings):
        # native.py and setup.py read the accelerator's variable themselves
        is_read = f"settings.{field.name}" in text or field.name == "accelerator"
        assert is_read != bool(field.metadata["idle"]), f"{field.name}: {is_read=} {field.metadata['idle']=}"


def test_variables_without_effect_are_accepted_with_one_warning():
    with pytest.warns(UserWarning, match=r"GC_INTERVAL_STEP .*GLOO_TIMEOUT") as caught:
        settings = read(GC_INTERVAL_STEP="10", GLOO_TIMEOUT="nonsense", SAMPLER_FORCE_TOPK="2")
    assert settings.sampler_force_topk == 2
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(SAMPLER_FORCE_TOPK="2")


def test_settings_are_frozen_and_travel_to_workers():
    settings = read(DECODE_TOKEN_BLACKLIST="1..4")
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.accelerator = "cpu"


def test_the_documentation_holds_the_table():
    assert table() in (ROOT / "doc" / "settings.md").read_text()


def test_the_module_prints_the_table():
    printed = subprocess.run(
        [sys.executable, "-m", "deepinfer.settings"], cwd=ROOT, capture_output=True, text=True
    )
    assert printed.stdout == table()
