"""§9.2 ds_config. Guards against: a batch triangle over the wrong ranks, silent typos, half-read files.

Field report B39: the product rule counts data-parallel ranks, not all ranks.
"""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_lite.config import Batch, load_config, refuse_what_is_not_built, resolve_batch
from ds_lite.config_check import BATCH_KEYS
from ds_lite.config_ignored import UNUSED_KEYS
from ds_lite.config_keys import Block, DSConfig

TYPO = {"train_batch_size": 8, "grandient_accumulation_steps": 2}


# --- the batch triangle ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "train,micro,steps,expected",
    [
        (16, 2, None, Batch(16, 2, 4)),
        (16, None, 4, Batch(16, 2, 4)),
        (None, 2, 4, Batch(16, 2, 4)),
        (16, 2, 4, Batch(16, 2, 4)),
        (8, None, None, Batch(8, 4, 1)),
        (None, 2, None, Batch(4, 2, 1)),
    ],
)
def test_any_given_batch_size_determines_the_rest_with_two_data_ranks(train, micro, steps, expected):
    assert resolve_batch(train, micro, steps, data_parallel_size=2) == expected


def test_counting_all_ranks_instead_of_data_ranks_would_give_another_answer():
    assert resolve_batch(16, 2, None, data_parallel_size=2).gradient_accumulation_steps == 4  # pp=2 x dp=2
    assert resolve_batch(16, 2, None, data_parallel_size=4).gradient_accumulation_steps == 2  # the four ranks


@pytest.mark.parametrize(
    "train,micro,steps,ranks,product",
    [
        (10, 4, None, 2, "10 != 4 * 1 * 2"),
        (16, 2, 2, 2, "16 != 2 * 2 * 2"),
        (7, None, None, 2, "7 != 3 * 1 * 2"),
        (7, None, 2, 2, "7 != 1 * 2 * 2"),
        (1, 2, None, 1, "1 != 2 * 0 * 1"),
    ],
)
def test_a_product_that_does_not_hold_is_printed(train, micro, steps, ranks, product):
    with pytest.raises(ValueError) as error:
        resolve_batch(train, micro, steps, data_parallel_size=ranks)
    assert product in str(error.value) and "§9.2" in str(error.value)


@pytest.mark.parametrize("steps", [None, 4])
def test_without_a_batch_size_the_missing_keys_are_named(steps):
    with pytest.raises(ValueError, match="give train_batch_size or train_micro_batch_size_per_gpu"):
        resolve_batch(None, None, steps, data_parallel_size=2)


@pytest.mark.parametrize("key", BATCH_KEYS)
@pytest.mark.parametrize("value", [0, -4, 2.0, 2.5, True, False, "4", [4]])
def test_a_batch_number_is_a_whole_number_of_at_least_one(key, value):
    numbers = dict.fromkeys(BATCH_KEYS) | {key: value}
    with pytest.raises(ValueError, match=f"{key}=.* must be a whole number of at least 1"):
        resolve_batch(*numbers.values(), data_parallel_size=1)
    with pytest.raises(ValueError, match=f"{key}=.* must be a whole number of at least 1"):
        load_config({key: value})


@pytest.mark.parametrize("ranks", [0, -1, True, 1.0, None])
def test_the_data_parallel_size_is_checked_too(ranks):
    with pytest.raises(ValueError, match="data_parallel_size"):
        resolve_batch(4, None, None, data_parallel_size=ranks)


small = st.integers(1, 64)


@given(train=st.none() | st.integers(1, 4096), micro=st.none() | small, steps=st.none() | small, ranks=small)
def test_whatever_is_returned_obeys_the_product_rule_and_keeps_what_was_given(train, micro, steps, ranks):
    try:
        batch = resolve_batch(train, micro, steps, ranks)
    except ValueError:
        return
    assert batch.train_batch_size == batch.micro_batch_size * batch.gradient_accumulation_steps * ranks
    found = (batch.train_batch_size, batch.micro_batch_size, batch.gradient_accumulation_steps)
    assert all(asked in (None, number) for asked, number in zip((train, micro, steps), found))
    assert min(found) >= 1


@given(micro=small, steps=small, ranks=small)
def test_any_two_numbers_of_a_true_triangle_give_the_third(micro, steps, ranks):
    whole = Batch(micro * steps * ranks, micro, steps)
    assert resolve_batch(None, micro, steps, ranks) == whole
    assert resolve_batch(whole.train_batch_size, None, steps, ranks) == whole
    assert resolve_batch(whole.train_batch_size, micro, None, ranks) == whole


# --- what is read ------------------------------------------------------------------------------------------


def test_a_dict_a_path_and_a_string_give_the_same_config(tmp_path):
    given_dict = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(given_dict))
    assert load_config(given_dict) == load_config(path) == load_config(str(path))
    assert load_config(path).optimizer.params == {"lr": 0.1}
    assert load_config({"train_batch_size": 9}) != load_config({"train_batch_size": 8})


def test_the_dict_passed_in_is_neither_changed_nor_shared():
    given_dict = {"bfloat16": {}, "zero_optimization": {"overlap_comm": True}}
    given_dict["optimizer"] = {"type": "Adam", "params": {"betas": [0.9, 0.99]}}
    before = copy.deepcopy(given_dict)
    config = load_config(given_dict)
    config.optimizer.params["betas"].append(1)
    assert given_dict == before


def test_a_silent_config_clips_nothing():
    config = load_config({})
    assert config.gradient_clipping == 0.0
    assert config.zero_optimization.stage == 0 and not config.fp16.enabled and not config.bf16.enabled


def test_keys_that_change_nothing_are_listed_once_each_by_dotted_name():
    config = load_config(
        {
            "wandb": {"anything": {"goes": 1}},
            "zero_optimization": {"stage": 1, "allgather_bucket_size": 5e8},
            "pipeline": {"stages": "auto", "pipe_partitioned": True, "activation_checkpoint_interval": 1},
        }
    )
    assert config.unused == [
        "wandb",
        "zero_optimization.allgather_bucket_size",
        "pipeline.stages",
        "pipeline.pipe_partitioned",
    ]
    assert config.zero_optimization.stage == 1 and config.pipeline.activation_checkpoint_interval == 1


def test_the_spellings_of_the_chapter_are_accepted():
    config = load_config(
        {
            "tensor_parallel": {"tp_size": 4, "tp_grain_size": 8},
            "zero_optimization": {"stage": 2, "moe_layer_size_threshold": 0, "moe_min_capacity": 4},
            "sequence_parallel_size": 4,
        }
    )
    assert config.tensor_parallel.degree == 4 and config.tensor_parallel.grain == 8 and not config.unused


@pytest.mark.parametrize(
    "block", [{"autotp_size": 4}, {"tp": {"tp_size": 4}}, {"tp_size": 4, "autotp_size": 4}]
)
def test_every_spelling_of_the_tensor_parallel_degree_is_read(block):
    assert load_config({"tensor_parallel": block}).tensor_parallel.degree == 4
    assert load_config({}).tensor_parallel.degree == 1


def test_every_key_is_described():
    def described(block: type[Block]) -> None:
        for name, info in block.model_fields.items():
            assert info.description, f"{block.__name__}.{name}"
            if isinstance(info.annotation, type) and issubclass(info.annotation, Block):
                described(info.annotation)

    described(DSConfig)
    assert all(UNUSED_KEYS.values())


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config,unknown,suggestion",
    [
        (TYPO, "grandient_accumulation_steps", "gradient_accumulation_steps"),
        ({"zero_optimization": {"stag": 1}}, "zero_optimization.stag", "zero_optimization.stage"),
        (
            {"zero_optimization": {"overlap_com": 1}},
            "zero_optimization.overlap_com",
            "zero_optimization.overlap_comm",
        ),
        ({"tp_size": 2}, "tp_size", "tensor_parallel.tp_size"),
        ({"fp61": {}}, "fp61", "fp16"),
        (
            {"checkpoint": {"parallel_write": {"pipelinestage": True}}},
            "checkpoint.parallel_write.pipelinestage",
            "checkpoint.parallel_write.pipeline_stage",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(config, unknown, suggestion):
    with pytest.raises(ValueError) as error:
        load_config(config)
    assert f"'{unknown}' (did you mean '{suggestion}'?)" in str(error.value)


def test_all_unknown_keys_stand_in_one_message_and_a_hopeless_one_gets_no_suggestion():
    with pytest.raises(ValueError) as error:
        load_config(TYPO | {"zzzz": 1, "optimizer": {"type": "SGD", "param": {}}})
    for key in ("'grandient_accumulation_steps' (did", "'zzzz', ", "'optimizer.param' (did"):
        assert key in str(error.value)


@pytest.mark.parametrize(
    "config,key",
    [
        ({"train_batch_size": "auto"}, "'train_batch_size' (write a whole number)"),
        ({"gradient_clipping": "auto"}, "'gradient_clipping' (write a number)"),
        ({"fp16": {"enabled": "auto"}}, "'fp16.enabled' (write true or false)"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "'optimizer.params.lr'"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, "auto"]}}}, "'optimizer.params.betas[1]'"),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "'zero_optimization.reduce_bucket_size'"),
    ],
)
def test_auto_is_refused_by_key_name(config, key):
    with pytest.raises(ValueError, match='"auto"') as error:
        load_config(config)
    assert key in str(error.value)


def test_auto_stays_where_it_is_a_value_of_its_own():
    config = load_config({"pipeline": {"stages": "auto"}, "expert_parallel": {"top_k": "auto"}})
    assert config.pipeline.stages == "auto"


@pytest.mark.parametrize(
    "config,message",
    [
        ({"fp16": True}, "fp16=True must be a JSON object"),
        ({"optimizer": {"params": {}}}, "optimizer.type is missing"),
        ({"optimizer": {"type": 3}}, "optimizer.type=3 must be"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4 must be less than or equal to 3"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage=True must be"),
        ({"gradient_clipping": -1.0}, "gradient_clipping=-1.0 must be"),
        ({"gradient_clipping": float("inf")}, "gradient_clipping=inf must be"),
        ({"gradient_clipping": "1.0"}, "gradient_clipping='1.0' must be"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled=1 must be"),
        ({"sequence_parallel_size": 0}, "sequence_parallel_size=0 must be"),
        ({"compile": {"passes": ["z9"]}}, "compile.passes='z9' must be 'z1', 'z3', 'autosp' or 'autotp'"),
        ({"bf16": {}, "bfloat16": {}}, "bf16 is given under two spellings"),
        ({"tensor_parallel": {"tp_size": 4, "autotp_size": 2}}, "tp_size=4, .*autotp_size=2 contradict"),
        ({"tensor_parallel": {"tp": {"tp_size": 2}, "tp_size": 4}}, "tp_size=4, .*tp.tp_size=2 contradict"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_rule(config, message):
    with pytest.raises(ValueError, match=message):
        load_config(config)


@pytest.mark.parametrize(
    "text,message",
    [
        ('{"seed": 1, "seed": 2}', "duplicate key 'seed'"),
        ('{"fp16": {"enabled": true, "enabled": false}}', "duplicate key 'enabled'"),
        ('{"seed": ', "not valid JSON at line 1"),
        ("", "not valid JSON"),
        ('{"gradient_clipping": NaN}', "NaN is not a JSON number"),
        ("[1, 2]", "holds a list"),
        ('{"zed": 2}', "unknown key 'zed'"),
        ('{"train_batch_size": 0}', "train_batch_size=0"),
    ],
)
def test_every_complaint_about_a_file_names_the_file(tmp_path, text, message):
    path = tmp_path / "my_config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_config(path)
    assert str(path) in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.json: cannot be read"):
        load_config(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match="cannot be read"):
        load_config(tmp_path)
    binary = tmp_path / "weights.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"weights\.bin: not a text file"):
        load_config(binary)


@pytest.mark.parametrize("config", [None, 3, ["a"]])
def test_something_other_than_a_config_is_a_type_error(config):
    with pytest.raises(TypeError, match="pass a dict or the path"):
        load_config(config)


@pytest.mark.parametrize(
    "config,message",
    [
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage=3 is refused"),
        (
            {"tensor_parallel": {"injection_policy_tuple": ["o_proj"]}},
            "injection_policy_tuple is not read.*partition_config",
        ),
        (
            {"expert_parallel": {"expert_tensor_parallel_size": 2}},
            "expert_tensor_parallel_size=2 is neither 1",
        ),
        ({"compile": {"passes": ["z1"]}}, r"compile.passes=\['z1'\] is not yet"),
    ],
)
def test_what_is_not_built_is_understood_and_then_refused(config, message):
    loaded = load_config(config)
    with pytest.raises(ValueError, match=message):
        refuse_what_is_not_built(loaded)


def test_what_is_off_or_built_is_not_refused():
    off = {"fp16": {"enabled": False}, "sequence_parallel_size": 2, "compile": {}}
    for on in ({"tensor_parallel": {"tp_size": 2}}, {"zero_optimization": {"stage": 2}}):
        assert refuse_what_is_not_built(load_config(off | on)) is None
    for on in ({"bf16": {"enabled": True}}, {"bfloat16": {"enabled": True}}, {"fp16": {"enabled": True}}):
        assert refuse_what_is_not_built(load_config(on)) is None


@pytest.mark.parametrize(
    "block,degree", [({"tp_size": 2}, 2), ({"autotp_size": 4}, 4), ({"tp": {"tp_size": 3}}, 3), ({}, 1)]
)
def test_both_spellings_of_the_tensor_parallel_degree_are_read(block, degree):
    tensor_parallel = load_config({"tensor_parallel": block}).tensor_parallel
    assert tensor_parallel.degree == degree and tensor_parallel.is_given == bool(block)
