"""What algorithms share that learn from a model's own answers: roles, settings and calls around them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from realhf.algorithms.policy_loss import PolicyLoss, PolicyLossConfig
from realhf.calls import (
    Generate,
    HostFunction,
    LogProbs,
    OptimizerConfig,
    SamplingConfig,
    Scores,
    TrainStep,
)
from realhf.data.dataset import DatasetConfig, extra_columns
from realhf.experiment import Experiment, Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.rewards.scoring import RewardCall, RewardFunction, column_key, reward_columns

if TYPE_CHECKING:
    from realhf.data.batch import Batch

SEQUENCE = ("sequence_ids", "response_mask")


@dataclass
class OnPolicy(Experiment):
    """The actor answers, a function or a model scores, the actor trains; subclasses find the advantages."""

    actor: Role = field(default_factory=lambda: Role(model="", optimizer=OptimizerConfig()))
    ref: Role | None = None
    """The reference, where one is needed; None: the actor's initial weights."""
    reward: Role | None = None
    """A reward model, when there is no reward function."""
    reward_scores: Scores = field(default_factory=Scores)
    """How the reward model's head is read."""
    reward_function: RewardFunction | None = None
    eval_function: RewardFunction | None = None
    """Scores the answers to `eval_dataset`; None: the training reward does."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    minibatches: int = 1
    epochs: int = 1
    max_rows: int = 512
    """Sequences that a rank decodes at once; the others wait for a free slot."""
    kv_cache_gib: float | None = None
    """GiB of a rank for keys and values; None: what `max_rows` sequences of full length need, at most half of
    what is free."""
    prefill_tokens: int = 8192
    """Tokens of prompts in one pass; a longer prompt is cut into pieces."""
    work_stealing: bool = True
    """Replicas that are done early take waiting prompts of others. Which ones depends on timing, and with it
    the last bits of log-probs, and in bfloat16 the odd token: switch it off for runs that must repeat bit for
    bit."""
    cuda_graphs: bool = True
    """On a GPU, decoding steps are recorded and replayed: of models without experts that a rank has whole."""
    router_aux_loss_coef: float = 0.0
    """Weight of the routers' load-balancing loss, for an actor with experts."""
    router_z_loss_coef: float = 0.0

    def shared_roles(self, *, with_ref: bool) -> dict[str, Role]:
        if (self.reward is None) == (self.reward_function is None):
            raise ValueError("give either reward_function or a reward role, and not both")
        lora = self.actor.lora  # Without an adapter to start from, the base is the initial model.
        lora = lora if lora is not None and lora.adapter is not None else None
        ref = self.ref or replace(self.actor, optimizer=None, lora=lora)
        named = {"actor": self.actor, "ref": ref if with_ref else None, "reward": self.reward}
        return {name: role for name, role in named.items() if role is not None}

    def actor_generate(self) -> FunctionCall:
        work = Generate(
            sampling=self.sampling, max_rows=self.max_rows, kv_cache_gib=self.kv_cache_gib,
            prefill_tokens=self.prefill_tokens, work_stealing=self.work_stealing,
            cuda_graphs=self.cuda_graphs)
        outputs = (*SEQUENCE, "gen_logprobs", "finished")
        return FunctionCall("actor_generate", "generate", ("prompt_ids",), outputs, role="actor", work=work)

    def ref_forward(self) -> FunctionCall:
        work = LogProbs(temperature=self.temperature)
        return FunctionCall("ref_forward", "forward", SEQUENCE, ("ref_logprobs",), role="ref", work=work)

    def reward_forward(self) -> FunctionCall:
        if self.reward_function is not None:
            return self._reward_call(self.reward_function, self.dataset)
        work = self.reward_scores
        return FunctionCall("reward_forward", "forward", SEQUENCE[:1], ("score",), role="reward", work=work)

    def _reward_call(self, function: RewardFunction, dataset: DatasetConfig) -> FunctionCall:
        columns = reward_columns(function, extra_columns(dataset))
        work = HostFunction(RewardCall(function, columns), splittable=True)
        inputs = ("prompt", *SEQUENCE, *(column_key(column) for column in columns))
        return FunctionCall("reward_forward", "host", inputs, ("score", "completion"), work=work)

    def actor_train(self) -> FunctionCall:
        work = TrainStep(
            PolicyLoss(self.loss), self.minibatches, self.epochs, self.temperature,
            self.router_aux_loss_coef, self.router_z_loss_coef)
        inputs = (*SEQUENCE, "gen_logprobs", "advantages", *(("ref_logprobs",) if self.loss.kl_coef else ()))
        return FunctionCall("actor_train", "train_step", inputs, role="actor", work=work)

    @property
    def temperature(self) -> float:
        """At which log-probs are taken; greedy sampling leaves the distribution as it is."""
        return self.sampling.temperature or 1.0

    def eval_graph(self) -> DataflowGraph:
        function = self.eval_function or self.reward_function
        greedy = replace(self, sampling=replace(self.sampling, temperature=0.0, top_k=0, top_p=1.0))
        if function is not None:
            reward = self._reward_call(function, self.eval_dataset or self.dataset)
            return graph_of(greedy.actor_generate(), reward)
        work = HostFunction(_decode, splittable=True)
        decode = FunctionCall("eval_decode", "host", SEQUENCE, ("completion",), work=work)
        return graph_of(greedy.actor_generate(), greedy.reward_forward(), decode)


def graph_of(*calls: FunctionCall) -> DataflowGraph:
    """The graph of these calls, the dataset bringing what none of them writes."""
    written = {key for call in calls for key in call.outputs}
    read = dict.fromkeys(key for call in calls for key in call.inputs)
    return DataflowGraph(calls, tuple(key for key in read if key not in written))


def _decode(batch: Batch, context: Any) -> dict[str, list[str]]:
    pairs = zip(*(batch[key].split() for key in SEQUENCE), strict=True)
    answers = [tokens[mask.bool()].tolist() for tokens, mask in pairs]
    return {"completion": [context.tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]}
