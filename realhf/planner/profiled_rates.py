"""Rates that look times up in the tables of a profile, and say what they did not find there."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from realhf.calls import Output
from realhf.cluster import Cluster
from realhf.execution_plan import ExecutionPlan
from realhf.planner.efficiencies import Efficiencies
from realhf.planner.links import Span
from realhf.planner.problem import ModelRole, Problem
from realhf.planner.profile import NOISY, Profile, Table, shape_of
from realhf.planner.rates import Cost, Rates, SharedPrompts
from realhf.planner.step_time import predict

_ALONE = Span(1, 1)


class Split(NamedTuple):
    """The sizes by which the matrices of a block are split over ranks of one host."""

    tp: int
    ep: int

    def __str__(self) -> str:
        sizes = [f"{axis}={size}" for axis, size in zip(("tp", "ep"), self, strict=True) if size > 1]
        return " and ".join(sizes) or "tp=1"

    def nearest(self, splits: Iterable["Split"]) -> "Split":
        """Return the split whose sizes differ least from these, as factors."""
        return min(splits, key=lambda split: np.abs(np.log2(split) - np.log2(self)).sum())


class ProfiledRates(Rates):
    """Rates from the tables of a profile.

    What was not measured comes from the roofline of `cluster`, by default that of the profile:

    - A shape, dtype or number of ranks that has no table takes its roofline.
    - A block of a measured shape, but split otherwise or over several hosts, takes its roofline times the
      ratio of measurement and roofline under the nearest split.
    - Beyond the `reach` of a table, times grow as the roofline does.

    `notes` has a sentence about each of these cases that came up.

    The backward pass of a block includes the accumulation of its gradients, and that of a head the rest of a
    micro-batch.
    """

    def __init__(
        self, profile: Profile, cluster: Cluster | None = None, *, link: float | None = None
    ) -> None:
        """Set up the rates; `link` is the share of links' bandwidth that is reached, where it is known."""
        if cluster is not None:
            profile.require_serves(cluster)
        cluster = cluster or profile.cluster
        efficiencies = _efficiencies(profile.cluster, cluster)
        super().__init__(cluster, efficiencies if link is None else replace(efficiencies, link=link))
        self.profile = profile
        self._link = link
        self._links = {entry.hosts: entry.tables for entry in profile.links}
        self._calls = profile.calls
        self._models: dict[tuple[Any, ...], dict[Split, Mapping[str, Table]]] = {}
        self._whole: dict[tuple[Any, ...], dict[Split, Mapping[str, float]]] = {}
        for entry in profile.models:
            split = Split(entry.tp, entry.ep)
            self._models.setdefault(entry.key, {})[split] = entry.tables
            self._whole.setdefault(entry.key, {})[split] = entry.whole_calls
        self.notes: dict[str, None] = {}

    def on(self, cluster: Cluster) -> "ProfiledRates":
        return ProfiledRates(self.profile, cluster, link=self._link)

    def call_seconds(self, kind: str, *, samples: float) -> float:
        table = self._calls.get(kind)
        return super().call_seconds(kind, samples=samples) if table is None else table.at(samples)

    def crowding(self, kind: str, num_busy: int) -> float:
        """Return the crowding of a host, relative to that of the measurements, in which all ranks are busy.

        Processes that take turns on a core empty its caches for each other.
        """
        cores = self.cluster.cores_per_host
        is_calm = cores is not None and num_busy <= cores
        work = "decode" if kind == "generate" else "passes"
        return self.profile.calm.get(work, 1.0) if is_calm else super().crowding(kind, num_busy)

    def whole_call(self, kind: str, role: ModelRole, tp: Span, ep: Span) -> float:
        """Return the measured seconds of a whole call, under the nearest split, relative to its tables."""
        by_split = self._whole.get((*shape_of(role.config), role.dtype), {})
        ratios = {split: by_kind[kind] for split, by_kind in by_split.items() if kind in by_kind}
        if not ratios:
            return 1.0
        wanted = Split(tp.size, ep.size)
        near = wanted.nearest(ratios)
        if near != wanted or max(tp.hosts, ep.hosts) > 1:
            where = " over several hosts" if max(tp.hosts, ep.hosts) > 1 else ""
            self._note(f"whole {kind} calls of {_name(role)} with {wanted}{where}: as with {near}")
        return ratios[near]

    # Links

    def all_reduce(self, num_bytes: Any, span: Span) -> Any:
        return self._collective("all_reduce", num_bytes, span)

    def reduce_scatter(self, num_bytes: Any, span: Span) -> Any:
        return self._collective("reduce_scatter", num_bytes, span)

    def all_gather(self, num_bytes: Any, span: Span) -> Any:
        return self._collective("all_gather", num_bytes, span)

    def all_to_all(self, num_bytes: Any, span: Span) -> Any:
        return self._collective("all_to_all", num_bytes, span)

    def _collective(self, name: str, num_bytes: Any, span: Span) -> Any:
        if span.size == 1:
            return 0.0
        table = self._links.get(span.hosts, {}).get(name)
        if table is not None and table.axes["ranks"][0] <= span.size <= table.axes["ranks"][-1]:
            seconds = table.at(span.size, num_bytes)
            if span.num_sharing == span.per_host:
                return seconds
            # It was measured without the groups that share the ports of its hosts.
            return np.maximum(seconds, getattr(self.ports, name)(num_bytes, span))
        where = f"among {span.size} ranks of {span.hosts} host{'s'[: span.hosts > 1]}"
        self._note(f"{name.replace('_', '-')} {where}: the figures of the cluster's links")
        return getattr(super(), name)(num_bytes, span)

    def send(self, num_bytes: float, *, within_host: bool, num_sending: int = 1) -> float:
        table = self._links.get(1 if within_host else 2, {}).get("send")
        if table is not None:
            port = self.ports.send(num_bytes, within_host=within_host, num_sending=num_sending)
            return max(table.at(num_bytes), port if num_sending > 1 else 0.0)
        if self.cluster.num_devices > 1:
            where = "inside a host" if within_host else "between hosts"
            self._note(f"messages {where}: the figures of the cluster's links")
        return super().send(num_bytes, within_host=within_host, num_sending=num_sending)

    def sending(self, num_bytes: float) -> float:
        """Return 0 where samples were measured: those seconds are from the first message to the last."""
        return self.samples(num_bytes) if self._samples is None else 0.0

    def samples(self, num_bytes: float) -> float:
        if self._samples is not None:
            return self._samples.at(num_bytes)
        return self.send(num_bytes, within_host=self.cluster.num_hosts == 1)

    @property
    def _samples(self) -> Table | None:
        return self._links.get(min(self.cluster.num_hosts, 2), {}).get("samples")

    # Computing

    def block(
        self, role: ModelRole, tp: Span, ep: Span, *, tokens: float, squared: float, backward: bool = False
    ) -> Cost:
        name = "block_backward" if backward else "block_forward"
        roof = partial(super().block, role, tp, ep, backward=backward)
        table = self._table(role, tp, ep, name)
        if table is None:
            cost = roof(tokens=tokens, squared=squared)
            near = self._nearest(role, tp, ep, name)
            if near is None:
                return cost
            ratio = self.block(role, *near, tokens=tokens, squared=squared, backward=backward).seconds
            ratio /= super().block(role, *near, tokens=tokens, squared=squared, backward=backward).seconds
            return Cost(cost.compute * ratio, cost.communication)

        def price(length: float, tokens: float) -> float:
            return roof(tokens=tokens, squared=length * tokens).compute

        seconds = self._read(table, price, role, squared / max(tokens, 1.0), tokens)
        if role.lora is not None:  # The table was measured without adapters.
            self._note(f"adapters of {_name(role)}: the measured block times the ratio of rooflines")
            without = super().block(
                replace(role, lora=None), tp, ep, tokens=tokens, squared=squared, backward=backward)
            seconds *= roof(tokens=tokens, squared=squared).compute / without.compute
        communication = 0.0
        width = role.config.hidden_size * role.itemsize
        if tp.size > 1:
            communication += 2 * self.all_reduce(tokens * width, tp)
        if ep.size > 1 and role.config.moe is not None:
            routed = tokens * role.config.moe.num_experts_per_token
            communication += 2 * self.all_to_all(routed * width, ep)
        communication = min(communication, seconds / 2)
        return Cost(seconds - communication, communication)

    def head(
        self, role: ModelRole, tp: Span, *, tokens: float, output: Output, backward: bool = False
    ) -> Cost:
        roof = partial(super().head, tp=tp, output=output, backward=backward)
        table = self._table(role, tp, _ALONE, f"{output}_{'backward' if backward else 'forward'}")
        if table is None:
            return roof(role, tokens=tokens)
        seconds = self._read(table, lambda tokens: roof(role, tokens=tokens).compute, role, tokens)
        return Cost(seconds + _widening(lambda role: roof(role, tokens=tokens).compute, role))

    def decode_block(
        self, role: ModelRole, tp: Span, ep: Span, *, rows: np.ndarray, context: np.ndarray,
        shared: SharedPrompts | None = None, longest: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        roof = partial(super().decode_block, longest=longest)
        own_prompts = self._table(role, tp, ep, "decode_block")
        if own_prompts is None:
            compute, communication = roof(role, tp, ep, rows=rows, context=context, shared=shared)
            near = self._nearest(role, tp, ep, "decode_block")
            if near is None:
                return compute, communication
            measured = sum(self.decode_block(
                role, *near, rows=rows, context=context, shared=shared, longest=longest))
            expected = sum(roof(role, *near, rows=rows, context=context, shared=shared))
            return compute * measured / expected, communication

        def price(context: np.ndarray, rows: np.ndarray) -> np.ndarray:
            return roof(role, tp, ep, rows=rows, context=context)[0]

        seconds = self._read(own_prompts, price, role, context, rows)
        one_prompt = self._table(role, tp, ep, "decode_shared")
        if shared is not None and one_prompt is not None:
            # The time is linear in the number of prompts, from one per row down to one in all.
            prompt = np.full_like(context, shared.tokens)
            most_saved = np.maximum(0.0, own_prompts.at(prompt, rows) - one_prompt.at(prompt, rows))
            seconds = seconds - most_saved * (rows - shared.prompts) / np.maximum(1.0, rows - 1)
        if role.int8:
            full = replace(role, int8=False)
            int8 = self._tables_of(role)[Split(tp.size, ep.size)].get("decode_int8")
            if int8 is None:
                how = "the measured block times the ratio of rooflines"
                self._note(f"decoding of {_name(role)} in int8: {how}")
                seconds = seconds * price(context, rows) / roof(full, tp, ep, rows=rows, context=context)[0]
            else:
                shortest = np.full_like(context, own_prompts.axes["context_tokens"][0])
                inside = np.minimum(rows, int8.reach[0])
                added = (int8.at(inside) - own_prompts.at(shortest, inside)) * rows / inside
                seconds = np.maximum(seconds / 4, seconds + added)
        communication = np.zeros_like(seconds)
        if tp.size > 1:
            communication += 2 * self.all_reduce(0.0, tp)
        if ep.size > 1:
            communication += self.all_reduce(0.0, ep)
        communication = np.minimum(communication, seconds / 2)
        return seconds - communication, communication

    def decode_head(self, role: ModelRole, tp: Span, *, rows: np.ndarray) -> np.ndarray:
        table = self._table(role, tp, _ALONE, "decode_head")
        head = partial(super().decode_head, tp=tp)
        if table is None:
            return head(role, rows=rows)
        seconds = self._read(table, lambda rows: head(role, rows=rows), role, rows)
        return seconds + _widening(partial(head, rows=rows), role)

    def packing(self, role: ModelRole, tp: Span, ep: Span, *, params: float) -> float:
        table = self._tables_of(role).get(Split(tp.size, ep.size), {}).get("packing")
        if params == 0 or table is None:
            return super().packing(role, tp, ep, params=params)
        return float(table.at(params))

    def decode_hop(self, role: ModelRole, *, rows: np.ndarray) -> np.ndarray:
        table = self._tables_of(role).get(Split(1, 1), {}).get("decode_hop")
        if table is None:
            self._note(f"messages between stages that decode {_name(role)}: they are sent beside other work")
            return super().decode_hop(role, rows=rows)
        return table.at(rows)

    def accumulate(self, role: ModelRole, params: float) -> float:
        measured = any("block_backward" in tables for tables in self._tables_of(role).values())
        return 0.0 if measured else super().accumulate(role, params)

    def update(self, role: ModelRole, *, owned: float) -> float:
        """Return the seconds of an optimizer step.

        The measured step had no gradients, and set them to zero first. After a backward pass it does not.
        """
        tables = self._tables_of(role).get(Split(1, 1), {})
        if not {"update", "zero_gradients"} <= tables.keys():
            return super().update(role, owned=owned)
        return max(0.0, tables["update"].at(owned) - tables["zero_gradients"].at(owned))

    # Tables

    def _tables_of(self, role: ModelRole) -> Mapping[Split, Mapping[str, Table]]:
        return self._models.get((*shape_of(role.config), role.dtype), {})

    def _table(self, role: ModelRole, tp: Span, ep: Span, name: str) -> Table | None:
        """Return a table about ranks of one host; None if there is none, which is noted."""
        split = Split(tp.size, ep.size)
        tables = self._tables_of(role)
        if tp.hosts == ep.hosts == 1 and name in tables.get(split, {}):
            return tables[split][name]
        if name != "decode_shared":
            where = f"{name.replace('_', ' ')} of {_name(role)} with {split}"
            where += " over several hosts" if max(tp.hosts, ep.hosts) > 1 else ""
            near = self._nearest(role, tp, ep, name) if "block" in name else None
            like = "" if near is None else f", scaled as measured with {Split(near[0].size, near[1].size)}"
            self._note(f"{where}: its roofline{like}")
        return None

    def _nearest(self, role: ModelRole, tp: Span, ep: Span, name: str) -> tuple[Span, Span] | None:
        """Return the measured split that is nearest to this one, as groups inside a host."""
        measured = [split for split, tables in self._tables_of(role).items() if name in tables]
        if not measured:
            return None
        near = Split(tp.size, ep.size).nearest(measured)
        return Span(near.tp, near.tp), Span(near.ep, near.ep)

    def _read(self, table: Table, roof: Callable[..., Any], role: ModelRole, *point: Any) -> Any:
        """Return the seconds at a point, which grow as the roofline does beyond the table's reach."""
        inside = tuple(np.minimum(value, most) for value, most in zip(point, table.reach, strict=True))
        seconds = table.at(*inside)
        beyond = [
            f"{np.max(value):.0f} {name.replace('_', ' ')} (used up to {most:.0f})"
            for name, value, most in zip(table.axes, point, table.reach, strict=True) if np.any(value > most)]
        if not beyond:
            return seconds
        self._note(f"{_name(role)} at {' and '.join(beyond)}: beyond that, times grow as its roofline")
        return seconds * roof(*point) / roof(*inside)

    def _note(self, what: str) -> None:
        self.notes[f"not measured: {what}"] = None


def _efficiencies(measured: Cluster, cluster: Cluster) -> Efficiencies:
    """Return the efficiencies of a cluster; figures that were measured are reached as they are."""
    usual = Efficiencies.of(cluster)
    same_links = (cluster.intra_host, cluster.inter_host) == (measured.intra_host, measured.inter_host)
    same_peaks = cluster.peak_flops == measured.peak_flops
    bandwidths = {each.memory_bandwidth_bytes_per_second for each in (measured, cluster)}
    return replace(
        usual, link=1.0 if same_links else usual.link, matmul=1.0 if same_peaks else usual.matmul,
        memory=1.0 if len(bandwidths) == 1 else usual.memory)


def not_measured(rates: Rates, problem: Problem, plan: ExecutionPlan) -> list[str]:
    """Return sentences about the prices of a plan that are not measurements of the rates' profile."""
    if not isinstance(rates, ProfiledRates):
        return []
    fresh = rates.on(rates.cluster)
    predict(problem, fresh, plan)
    noise, sentence = rates.profile.noise()
    disturbed = rates.profile.disturbed()
    return [
        *fresh.notes, *([f"noise: {sentence}"] if noise > NOISY else []),
        *([f"noise: {disturbed}"] if disturbed else [])]


def _name(role: ModelRole) -> str:
    c = role.config
    return f"{c.family} of width {c.hidden_size} in {role.dtype}"


def _widening(seconds: Callable[[ModelRole], Any], role: ModelRole) -> Any:
    """Return the seconds that a head in float32 takes longer than the measured one, by the roofline."""
    return seconds(role) - seconds(replace(role, float32_head=False)) if role.widens_head else 0.0
