"""Prompt files."""

import warnings

import pytest

from lit_diffrl.rollouts import Prompt, load_prompts


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
