"""Prompt files."""

import warnings

import pytest

from lit_diffrl.rollouts import Prompt, RolloutDataModule, load_prompts


def write(tmp_path, name: str, text: str):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    path = write(tmp_path, "a.txt", "a red fox\n  ein Fuß, rot \n")
    assert load_prompts(path) == [Prompt("a red fox"), Prompt("ein Fuß, rot")]
    assert load_prompts(str(path)) == load_prompts(path)


def test_a_json_file_keeps_source_and_metadata(tmp_path):
    path = write(
        tmp_path, "a.jsonl", '{"prompt": "two cats", "source": "count", "n": 2, "tags": ["x"]}\n{"prompt": " fox "}\n'
    )
    first, second = load_prompts(path)
    assert first == Prompt("two cats", "count", {"n": 2, "tags": ["x"]})
    assert second == Prompt("fox", "", {})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "a red fox\n\nb\n", r"a\.txt, line 2: empty prompt"),
        ("a.txt", "", "is empty"),
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "b"\n', r"a\.jsonl, line 2: not a JSON object"),
        ("a.jsonl", '{"prompt": "a"}\n\n', r"line 2: not a JSON object"),
        ("a.jsonl", '["a"]\n', "line 1: needs an object with a string"),
        ("a.jsonl", '{"text": "a"}\n', "line 1: needs an object with a string"),
        ("a.jsonl", '{"prompt": 3}\n', "line 1: needs an object with a string"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": " "}\n', "line 2: empty prompt"),
        ("a.jsonl", '{"prompt": "a", "source": 3}\n', 'line 1: "source" must be a string, got 3'),
        ("a.csv", "a\n", r"suffix '\.csv'; it must be \.txt or \.jsonl"),
    ],
)
def test_files_that_cannot_be_read_are_refused_with_the_line(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        load_prompts(write(tmp_path, name, text))


@pytest.mark.parametrize("path", ["nowhere.txt", "embedded:shapes/nowhere.jsonl"])
def test_a_file_that_is_not_there_is_refused(path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.\w+ does not exist"):
        load_prompts(path)


def test_prompts_that_repeat_stay_and_are_said_once(tmp_path):
    path = write(tmp_path, "a.txt", "fox\ncat\nfox\ncat\nfox\n")
    with pytest.warns(UserWarning, match="2 prompts stand more than once, the first being 'fox'") as said:
        assert len(load_prompts(path)) == 5
    assert len(said) == 1


def test_distinct_prompts_warn_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_prompts(write(tmp_path, "a.txt", "fox\ncat\n"))


def test_the_embedded_prompts_do_not_repeat_over_their_files():
    train, val, test = (load_prompts(f"embedded:shapes/{name}.jsonl") for name in ("train", "val", "test"))
    texts = [{p.text for p in part} for part in (train, val, test)]
    assert all(len(t) == len(p) for t, p in zip(texts, (train, val, test)))
    assert not texts[0] & texts[1] and not texts[0] & texts[2] and not texts[1] & texts[2]


def test_separators_within_a_json_string_do_not_cut_the_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one\u2028two"}\n{"prompt": "three\u0085"}\n', encoding="utf-8")
    assert [p.text for p in load_prompts(path)] == ["one\u2028two", "three"]


LINES = [("fox", "a"), ("cat", "b"), ("cow", "a"), ("dog", None), ("fox", "b")]


def of_sources(tmp_path, lines, name: str = "s.jsonl"):
    rows = [f'{{"prompt": "{text}"' + (f', "source": "{source}"}}' if source else "}") for text, source in lines]
    return write(tmp_path, name, "\n".join(rows) + "\n")


@pytest.mark.parametrize(
    ("sources", "texts"),
    [
        (None, "fox cat cow dog fox"),
        (["a"], "fox cow"),
        (["b", "a"], "fox cat cow fox"),
        ([""], "dog"),
        (["a", "a"], "fox cow"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*more than once")
def test_prompts_of_the_wanted_sources_stay_in_the_order_of_the_file(tmp_path, sources, texts):
    assert " ".join(p.text for p in load_prompts(of_sources(tmp_path, LINES), sources)) == texts


def test_only_prompts_in_use_are_said_to_repeat(tmp_path):
    path = of_sources(tmp_path, LINES)
    with pytest.warns(UserWarning, match="1 prompts stand more than once, the first being 'fox'"):
        load_prompts(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_prompts(path, ["a"])


def test_a_source_that_no_prompt_has_is_refused_with_those_there_are(tmp_path):
    path = of_sources(tmp_path, LINES)
    with pytest.raises(ValueError, match=r"prompt_sources names \['c', 'd'\], but .*s\.jsonl has \['', 'a', 'b'\]"):
        load_prompts(path, ["d", "a", "c"])
    text = write(tmp_path, "a.txt", "a red fox\n")
    assert load_prompts(text, [""]) == [Prompt("a red fox")]
    with pytest.raises(ValueError, match=r"prompt_sources names \['a'\], but .*a\.txt has \[''\]"):
        load_prompts(text, ["a"])


def test_no_source_at_all_is_refused(tmp_path):
    with pytest.raises(ValueError, match="prompt_sources is empty"):
        load_prompts(of_sources(tmp_path, LINES), [])


def test_a_run_trains_and_evaluates_on_its_sources_alone(tmp_path):
    train = of_sources(tmp_path, [("fox", "a"), ("cat", "b"), ("cow", "c")])
    val = of_sources(tmp_path, [("hen", "b"), ("owl", "c"), ("pig", "d"), ("rat", "b")], "val.jsonl")
    data = RolloutDataModule(train, val, predict_prompts=train, prompt_sources=["c", "b"])
    assert [p.text for p in data.prompts] == ["cat", "cow"] and data.sources == ["b", "c"]
    assert [p.text for p in data.val_prompts] == [p.text for p in data.test_prompts] == ["hen", "owl", "rat"]
    assert [p.text for p in data.predict_prompts] == ["cat", "cow"]
    with pytest.raises(ValueError, match=r"names \['a'\], but .*val\.jsonl has"):
        RolloutDataModule(train, val, prompt_sources=["a", "b"])
