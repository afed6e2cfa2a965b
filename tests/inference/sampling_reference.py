"""Sampling by transformers' own processors and criteria, in the order in which its generate applies them."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import transformers

from realhf.data.loader import load_tokenizer


class OpenAIPenalties(transformers.LogitsProcessor):
    """OpenAI's definition: logits[j] -= count[j] * frequency + (count[j] > 0) * presence, in the response."""

    def __init__(self, prompt_size, presence, frequency):
        self.prompt_size = prompt_size
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, tokens in zip(scores, input_ids[:, self.prompt_size :].tolist(), strict=True):
            for token in set(tokens):
                row[token] -= tokens.count(token) * self.frequency + self.presence
        return scores


@dataclass
class Reference:
    """Says for one row at a time which token is drawn and whether the response ends with it."""

    model: Any
    eos: list
    sampling: dict  # Fields of SamplingConfig.
    tokenizer: str | None = None
    limits: dict = field(default_factory=dict)  # Sample id -> its own limit.

    @property
    def temperature(self):
        return self.sampling.get("temperature", 1.0)

    @property
    def ends(self):
        """The tokens that end a response."""
        eos = [] if self.sampling.get("ignore_eos") else self.eos
        return [*eos, *self.sampling.get("stop_token_ids", ())]

    def config(self):
        """Return transformers' config with the same options, all but the penalties of OpenAI."""
        own = self.sampling
        settings = {name: own.get(name) for name in ("min_new_tokens", "repetition_penalty") if own.get(name)}
        if self.temperature:
            settings |= {"do_sample": True, "temperature": self.temperature, "top_k": own.get("top_k", 0)}
            settings |= {name: own[name] for name in ("top_p", "min_p") if name in own}
        if "logit_bias" in own:
            settings["sequence_bias"] = [[[token], bias] for token, bias in own["logit_bias"]]
        if "bad_word_ids" in own:
            settings["bad_words_ids"] = [list(word) for word in own["bad_word_ids"]]
        return transformers.GenerationConfig(eos_token_id=self.ends or None, pad_token_id=0, **settings)

    def scores(self, tokens, prompt_size, logits_V):
        """Return the logits of the distribution from which the next token is drawn."""
        config = self.config()
        config._eos_token_tensor = torch.tensor(self.ends) if self.ends else None
        own = self.sampling
        penalties = OpenAIPenalties(
            prompt_size, own.get("presence_penalty", 0.0), own.get("frequency_penalty", 0.0))
        processors = self.model._get_logits_processor(
            generation_config=config, input_ids_seq_length=prompt_size, logits_processor=[penalties],
            device="cpu", model_kwargs={})
        return processors(torch.tensor([tokens]), logits_V[None])[0]

    def token(self, tokens, prompt_size, logits_V, draw):
        """Return the next token: the most probable one, or that at `draw` in the CDF."""
        scores_V = self.scores(tokens, prompt_size, logits_V)
        if self.temperature == 0:
            return int(scores_V.argmax())
        return int((scores_V.softmax(-1).cumsum(0) <= draw).sum())

    @cached_property
    def _criterion(self):
        stops = list(self.sampling.get("stop", ()))
        return transformers.StopStringCriteria(load_tokenizer(self.tokenizer), stops) if stops else None

    def has_finished(self, response):
        """Return whether a response ends with its last token, whatever its limit is."""
        if not response or len(response) <= self.sampling.get("min_new_tokens", 0):
            return False
        if response[-1] in self.ends:
            return True
        return self._criterion is not None and self._criterion(torch.tensor([response]), None).item()

    def limit(self, sample, most):
        return min(most, self.limits.get(sample, most))
