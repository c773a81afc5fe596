"""Prompt embeddings: made once, and the same in any company."""

import random

import torch

from lit_diffrl.policies import SD3Policy
from lit_diffrl.policies.conditioning import PromptCache

WORDS = ["a", "red", "blue", "green", "fox", "bird", "tree", "house", "on", "under", "two", "three", "big", "small"]


def prompts(n):
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(2, 9))) for _ in range(n)]


def test_an_embedding_does_not_depend_on_the_prompts_beside_it(sd35_folder):
    policy = SD3Policy(sd35_folder)
    policy.load()
    texts = prompts(20)
    whole = PromptCache(policy.encode_prompts)(texts, policy.device)
    for i, text in enumerate(texts):
        alone = PromptCache(policy.encode_prompts)([text], policy.device)
        assert all(torch.equal(alone[k][0], whole[k][i]) for k in whole)


def test_a_prompt_is_encoded_once():
    calls = []

    def encode(texts):
        calls.append(list(texts))
        return {"x": torch.tensor([[float(len(t))] for t in texts])}

    cache = PromptCache(encode)
    for batch in (["a", "bb"], ["bb", "a", "a"], ["a", "ccc"]):
        assert cache(batch, torch.device("cpu"))["x"].flatten().tolist() == [len(p) for p in batch]
    assert [set(c) for c in calls] == [{"a", "bb"}, {"ccc"}]


def test_the_least_recently_used_prompt_is_forgotten_first():
    cache = PromptCache(lambda texts: {"x": torch.zeros(len(texts), 1)}, capacity=8)
    for batch in (["a"], ["b"], ["a"], ["c"]):
        cache(batch, torch.device("cpu"))
    assert set(cache.entries) == {"a", "c"}


def test_embeddings_of_unequal_length_are_padded_with_zeros():
    cache = PromptCache(lambda texts: {"x": torch.ones(len(texts), len(texts[0]), 3)})
    cache(["aa"], torch.device("cpu"))
    both = cache(["aa", "bbbb"], torch.device("cpu"))["x"]
    assert both.shape == (2, 4, 3)
    assert both[0].sum() == 6 and both[1].sum() == 12
