"""Content that a config file may have, and the messages for any other content."""

import pytest

from nsa.errors import ConfigError
from nsa_train.config import load
from nsa_train.config.schema import settings


@pytest.fixture
def write(tmp_path):
    def to_file(text: str):
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return file

    return to_file


@pytest.fixture
def problems(write):
    """The problems of a YAML text, one per line, with the file's own path shortened to run.yaml."""

    def of(text: str, **layers) -> list[str]:
        file = write(text)
        with pytest.raises(ConfigError) as caught:
            load(file, **layers)
        head, *listed = str(caught.value).replace(str(file), "run.yaml").splitlines()
        count = "1 problem" if len(listed) == 1 else f"{len(listed)} problems"
        assert head == f"run.yaml cannot be used, {count}:"
        return [line.removeprefix("  - ") for line in listed]

    return of


class TestTypes:
    """YAML 1.1 would guess a type from the text; the setting decides instead."""

    @pytest.mark.parametrize("text", ["2e-4", "2.0e-4", "0.0002", "'2e-4'"])
    def test_a_float_in_any_spelling(self, write, text):
        assert load(write(f"train: {{lr: {text}}}")).train.lr == 2e-4

    @pytest.mark.parametrize("text", ["50000", "50_000", "50000.0"])
    def test_a_whole_number_in_any_spelling(self, write, text):
        steps = load(write(f"train: {{steps: {text}}}")).train.steps
        assert (steps, type(steps)) == (50000, int)

    @pytest.mark.parametrize(
        ("text", "value"), [("no", False), ("off", False), ("0", False), ("yes", True), ("on", True)]
    )
    def test_a_switch_in_any_spelling(self, write, text, value):
        assert load(write(f"data: {{prefetch: {text}}}")).data.prefetch is value

    @pytest.mark.parametrize("text", ["no", "12:30", "1e3", "2024-01-01", "0x10", "on", "'null'"])
    def test_text_stays_the_text_that_was_written(self, write, text):
        assert load(write(f"data: {{tokenizer: {text}}}")).data.tokenizer == text.strip("'")

    @pytest.mark.parametrize("text", ["null", "~", ""])
    def test_null_where_a_setting_allows_it(self, write, text):
        assert load(write(f"data:\n  path: {text}\n")).data.path is None

    @pytest.mark.parametrize(
        ("section", "key", "text", "rule"),
        [
            ("train", "lr", "abc", "must be a number > 0 (got 'abc')"),
            ("train", "lr", "12:30", "must be a number > 0 (got '12:30')"),
            ("train", "lr", "yes", "must be a number > 0 (got 'yes')"),
            ("train", "lr", "nan", "must be a number > 0 (got 'nan')"),
            ("train", "lr", "inf", "must be a number > 0 (got 'inf')"),
            ("train", "lr", "0", "must be a number > 0 (got '0')"),
            ("train", "lr", "", "must be a number > 0 (got no value)"),
            ("train", "steps", "12:30", "must be a whole number ≥ 1, in steps (got '12:30')"),
            ("train", "steps", "1.5", "must be a whole number ≥ 1, in steps (got '1.5')"),
            ("train", "steps", "true", "must be a whole number ≥ 1, in steps (got 'true')"),
            ("train", "seed", "-1", "must be a whole number ≥ 0 and < 4294967296 (got '-1')"),
            ("train", "seed", "4294967296", "must be a whole number ≥ 0 and < 4294967296 (got '4294967296')"),
            ("data", "held_out", "1", "must be a number ≥ 0 and < 1 (got '1')"),
            ("data", "prefetch", "2", "must be true or false (got '2')"),
            ("data", "path", "''", "must be text or null (got '')"),
            ("model", "ffn_dim", "0", "must be a whole number ≥ 1 or null (got '0')"),
            ("runtime", "device", "gpu", "must be auto, cpu, cuda or cuda:N (got 'gpu')"),
            (
                "runtime",
                "precision",
                "bfloat16",
                "must be one of bf16, fp16, fp32 (got 'bfloat16'). Did you mean bf16?",
            ),
        ],
    )
    def test_a_value_of_another_type_is_refused_at_its_line(self, problems, section, key, text, rule):
        (problem,) = problems(f"{section}:\n\n  {key}: {text}\n")
        assert problem.startswith(f"run.yaml:3: {section}.{key} {rule}")

    def test_the_message_explains_the_setting(self, problems):
        (problem,) = problems("train:\n  lr: abc\n")
        assert str(settings()["train.lr"].description) in problem
        assert problem.endswith("Default: 0.0003.")


class TestInnerSection:
    """`model.rope_scaling` is a mapping inside a section, as in a Hugging Face config."""

    def test_its_keys_have_types_and_lines(self, write):
        file = write("model:\n  dim: 64\n  rope_scaling:\n    type_of_nothing: 1\n")
        with pytest.raises(ConfigError, match=r":4: unknown key model\.rope_scaling\.type_of_nothing"):
            load(file)
        config = load(write("model:\n  rope_scaling:\n    rope_type: linear\n    factor: 4\n"))
        assert config.model.rope_scaling.factor == 4.0
        assert config.origin("model.rope_scaling.factor").endswith("run.yaml:4")
        assert config.value("model.rope_scaling.rope_type") == "linear"

    def test_the_command_line_overrides_one_key(self, write):
        file = write("model: {rope_scaling: {rope_type: linear, factor: 4}}\n")
        config = load(file, overrides=["model.rope_scaling.factor=8"])
        assert (config.model.rope_scaling.rope_type, config.model.rope_scaling.factor) == ("linear", 8.0)
        assert config.origin("model.rope_scaling.factor") == "command line"

    @pytest.mark.parametrize("text", ["", "null", "{}"])
    def test_null_is_no_scaling(self, write, text):
        assert load(write(f"model:\n  rope_scaling: {text}\n")) == load(write("model:\n"))

    def test_what_it_refuses(self, problems):
        (problem,) = problems("model:\n  rope_scaling: 8\n")
        assert problem.startswith("run.yaml:2: model.rope_scaling is a section")
        (problem,) = problems("model:\n  rope_scaling: {factor: abc}\n")
        assert problem.startswith("run.yaml:2: model.rope_scaling.factor must be a number > 0 or null (got 'abc')")
        (problem,) = problems("model:\n  rope_scaling.factor: 8\n")
        assert problem.endswith("write factor below rope_scaling:")
        (problem,) = problems("model:\n  rope_scaling: {rope_type: linear, factor: 1, factor: 2}\n")
        assert "model.rope_scaling.factor" in problem
        (problem,) = problems("model:\n", overrides=["model.rope_scaling=null"])
        assert "model.rope_scaling is a section" in problem


class TestShape:
    def test_a_key_written_twice_is_refused_with_both_lines(self, problems):
        (problem,) = problems("train:\n  lr: 1\n  seed: 1\n  lr: 2\n")
        assert problem.startswith("run.yaml:4: train.lr ")
        assert "line 2" in problem

    def test_a_section_written_twice_is_refused(self, problems):
        (problem,) = problems("train: {lr: 1}\nmodel: {dim: 8}\ntrain: {seed: 1}\n")
        assert problem.startswith("run.yaml:3: train ")
        assert "line 1" in problem

    @pytest.mark.parametrize(("value", "description"), [("[1, 2]", "a list"), ("{a: 1}", "a mapping")])
    def test_a_setting_takes_one_value(self, problems, value, description):
        (problem,) = problems(f"train:\n  lr: {value}\n")
        assert problem.startswith("run.yaml:2: train.lr ")
        assert description in problem

    def test_a_section_takes_keys(self, problems):
        (problem,) = problems("train: 5\n")
        assert problem.startswith("run.yaml:1: train is a section")

    def test_an_empty_section_is_fine(self, write):
        assert load(write("train:\nmodel: {dim: 8}\n")).model.dim == 8

    def test_dotted_keys_are_for_the_command_line(self, problems):
        (problem,) = problems("train.lr: 1\n")
        assert problem.startswith("run.yaml:1: train.lr ")
        assert problem.endswith("write lr below train:")

    @pytest.mark.parametrize(
        ("text", "description"), [("", "empty"), ("# only a comment\n", "empty"), ("- 1", "not a mapping")]
    )
    def test_a_file_without_sections_is_refused(self, problems, text, description):
        (problem,) = problems(text)
        assert problem.startswith(f"run.yaml: the file is {description}")

    def test_a_key_must_be_a_word(self, problems):
        (problem,) = problems("train:\n  ? [1]\n  : 2\n")
        assert problem.startswith("run.yaml:2: ")

    def test_broken_yaml_names_its_line(self, problems):
        (problem,) = problems("train:\n  lr: 1\n wrong: [\n")
        assert problem.startswith("run.yaml:3: not valid YAML (")

    def test_characters_that_yaml_forbids_are_reported_on_one_line(self, problems):
        (problem,) = problems("train:\n  lr: \x01\n")
        assert problem.startswith("run.yaml: not valid YAML (unacceptable character")

    def test_merging_is_refused(self, problems):
        (problem,) = problems("train: &other\n  lr: 1\nmodel:\n  <<: *other\n")
        assert problem.startswith("run.yaml:4: ")
        assert "<<" in problem

    def test_a_tab_is_named_in_the_message(self, problems):
        (problem,) = problems("train:\n\tlr: 1\n")
        assert problem.startswith("run.yaml:2: not valid YAML (")
        assert problem.endswith("Indent with spaces, not tabs.")

    def test_two_documents_are_refused(self, problems):
        (problem,) = problems("train: {lr: 1}\n---\ntrain: {lr: 2}\n")
        assert "not valid YAML" in problem

    def test_tags_build_no_objects(self, write):
        marker = write("").parent / "made"
        file = write(f"train: {{out_dir: !!python/object/apply:os.mkdir ['{marker}']}}")
        with pytest.raises(ConfigError, match=r"train\.out_dir"):
            load(file)
        assert not marker.exists()

    def test_a_missing_file_suggests_its_neighbour(self, write):
        file = write("train:")
        with pytest.raises(ConfigError, match=rf"runn\.yaml: .*{file}\?"):
            load(file.with_name("runn.yaml"))
        with pytest.raises(ConfigError) as caught:
            load(file.with_name("else.yaml"))
        assert "?" not in str(caught.value)

    def test_a_folder_and_a_binary_file_are_refused(self, tmp_path):
        with pytest.raises(ConfigError):
            load(tmp_path)
        (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00\x80")
        with pytest.raises(ConfigError, match=r"x\.yaml"):
            load(tmp_path / "x.yaml")


class TestUnknownNames:
    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("train:\n  warmup_step: 1", "run.yaml:2: unknown key train.warmup_step. Did you mean train.warmup_steps?"),
            ("runtime:\n  Device: cpu", "run.yaml:2: unknown key runtime.Device. Did you mean runtime.device?"),
            (
                "train:\n  n_sel: 4",
                "run.yaml:2: unknown key train.n_sel: it belongs to another section. Did you mean nsa.n_sel?",
            ),
            ("dim: 4", "run.yaml:1: unknown key dim: it belongs below a section. Did you mean model.dim?"),
            ("profil: toy", "run.yaml:1: unknown key profil. Did you mean profile?"),
            ("train:\n  n_layer: 4", "run.yaml:2: unknown key train.n_layer. Did you mean model.n_layers?"),
            ("trian:\n  lr: 1", "run.yaml:1: unknown section trian. Did you mean train?"),
            (
                "xyz:\n  lr: 1",
                "run.yaml:1: unknown section xyz. Sections are model, nsa, runtime, kernels, train, parallel, data, "
                "track.",
            ),
            (
                "kernels:\n  qqq: 1",
                "run.yaml:2: unknown key kernels.qqq. Keys of kernels: compressed, select, selected, sliding.",
            ),
        ],
    )
    def test_the_nearest_known_one_is_suggested(self, problems, text, problem):
        assert problems(text) == [problem]

    @pytest.mark.parametrize(
        ("word", "problem"),
        [
            ("lr=1", "command line: unknown key lr: it belongs below a section. Did you mean train.lr?"),
            ("train.lrr=1", "command line: unknown key train.lrr. Did you mean train.lr?"),
            ("trian.lr=1", "command line: unknown key trian.lr: there is no section trian. Did you mean train?"),
            (
                "train=1",
                "command line: train is a section, not a setting. Set its keys one by one, e.g. train.steps.",
            ),
            ("train.lr", "command line: 'train.lr' is not key=value. Write e.g. train.lr=1e-4."),
        ],
    )
    def test_on_the_command_line_too(self, problems, word, problem):
        assert problems("train:", overrides=[word]) == [problem]


def test_everything_wrong_in_every_layer_is_listed_at_once(problems):
    messages = problems(
        "model: {n_heads: 12, n_kv_groups: 5, d_k: 15}\ntrain:\n  lr: abc\n  seed: 1\n  seed: 2\nnope: {}\n",
        environ={"NSA_TOKENISER": "byte", "NSA_FWE_Q": "many"},
        overrides=["data.packing=tight", "lr=1"],
    )
    starts = [
        "run.yaml:5: train.seed is a duplicate",
        "run.yaml:6: unknown section nope",
        "environment NSA_TOKENISER: ",
        "command line: unknown key lr",
        "run.yaml:1: model.n_kv_groups (5) must divide model.n_heads (12)",
        "run.yaml:1: model.d_k (15) must be even",
        "run.yaml:3: train.lr must be",
        "command line: data.packing must be one of",
        "environment NSA_FWE_Q: data.queue_depth must be",
    ]
    assert len(messages) == len(starts)
    for line, start in zip(messages, starts, strict=True):
        assert line.startswith(start)


class TestRetiredKeys:
    KEYS = ("use_triton_sel", "sel_triton_min_L", "fa2_enabled", "fa2_min_len_win", "fa2_min_len_cmp")

    def test_they_load_and_say_what_replaced_them(self, write):
        file = write("runtime:\n" + "".join(f"  {key}: -1\n" for key in self.KEYS))
        config = load(file)
        assert len(config.notices) == len(self.KEYS)
        for line, (key, notice) in enumerate(zip(self.KEYS, config.notices, strict=True), start=2):
            assert notice.startswith(f"{file}:{line}: runtime.{key} is retired")
            assert "kernels." in notice

    def test_they_change_nothing(self, write):
        with_retired = load(write("runtime: {use_triton_sel: true, fa2_enabled: maybe}")).model_dump()
        assert with_retired == load(write("runtime:")).model_dump()

    def test_a_clean_config_gives_no_notice(self, write):
        assert load(write("train: {lr: 1}")).notices == ()
