"""Random rows whose keys and values lie in pages of a cache, and their attention by a formula."""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.attention.interface import AttentionKind, Pages

NUM_PAGES = 24


@dataclass
class Case:
    """Arguments of `paged`, and the queries, keys and values of each row by itself."""

    q_TND: Tensor
    k_PLKD: Tensor
    v_PLKD: Tensor
    at: Pages
    kind: AttentionKind
    rows: list[tuple[Tensor, Tensor, Tensor]]

    def arguments(self):
        return self.q_TND, self.k_PLKD, self.v_PLKD, self.at, self.kind


def random_case(
    seed, *, dtype=torch.float64, pages=(1, 3, 16, 20, 64), dims=(3, 8, 24), decodes=None, most=(5, 3, 3)
):
    """Return a case with windows, soft caps, grouped heads, pages shared between rows, pieces of prompts.

    What no row has written to the cache is NaN. With `decodes`, each row has one query; None: by chance.
    `most` limits the number of rows, of own pages of a row, and of key-value heads.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    page, dim, heads, group = rng.choice(pages), rng.choice(dims), rng.randint(1, most[2]), rng.randint(1, 4)
    in_keys = rng.random() < 0.3
    value_dim = rng.randrange(1, dim + 1) if in_keys else rng.choice((dim, dim, rng.randrange(1, 9)))
    kind = AttentionKind(
        rng.choice((dim**-0.5, 0.7)), window=rng.choice((None, None, 1, rng.randrange(2, 60))),
        softcap=rng.choice((None, None, 1.5)))

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    k_PLKD = torch.full((NUM_PAGES, page, heads, dim), torch.nan, dtype=dtype)
    v_PLKD = k_PLKD[..., :value_dim]
    if not in_keys:
        v_PLKD = torch.full((NUM_PAGES, page, heads, value_dim), torch.nan, dtype=dtype)
    free = list(range(NUM_PAGES))
    rng.shuffle(free)
    shared = [free.pop() for _ in range(rng.randrange(0, 3))]
    num_rows = rng.randint(1, most[0])
    one_each = rng.random() < 0.4 if decodes is None else decodes
    tables, lens, queries = [], [], []
    for _ in range(num_rows):
        table = list(shared) if rng.random() < 0.7 else []
        own = rng.randint(1, most[1])
        length = page * (len(table) + own - 1) + rng.randrange(1, page + 1)
        tables.append(table + [free.pop() for _ in range(own)])
        lens.append(length)
        queries.append(1 if one_each else rng.choice((1, length, rng.randrange(1, length + 1))))
    for table in tables:
        for number in table:
            k_PLKD[number] = draw(page, heads, dim)
            if not in_keys:
                v_PLKD[number] = draw(page, heads, value_dim)
    for table, length in zip(tables, lens, strict=True):
        k_PLKD[table[-1], (length - 1) % page + 1 :] = torch.nan
        v_PLKD[table[-1], (length - 1) % page + 1 :] = torch.nan
    q_TND = draw(sum(queries), heads * group, dim)
    rows = [
        (q, k_PLKD[table].flatten(0, 1)[:length], v_PLKD[table].flatten(0, 1)[:length])
        for q, table, length in zip(q_TND.split(queries), tables, lens, strict=True)]
    width = max(map(len, tables)) + rng.randrange(0, 2)
    padded = [table + [rng.randrange(NUM_PAGES) for _ in range(width - len(table))] for table in tables]
    cu_q = torch.tensor([0, *queries]).cumsum(0)
    at = Pages(
        cu_q.int(), max(queries), torch.tensor(padded).int(), torch.tensor(lens).int(),
        rng.choice((max(lens), width * page)))
    return Case(q_TND, k_PLKD, v_PLKD, at, kind, rows)


def by_formula(q_IND, k_JKD, v_JKD, kind, *, is_causal=True):
    """Return out_IND and lse_IN, computed in float64, of the queries of one sequence's last tokens; or, not
    `is_causal`, of later ones."""
    group = q_IND.shape[1] // k_JKD.shape[1]
    q, k, v = (
        x.double().transpose(0, 1) for x in (q_IND, *(y.repeat_interleave(group, 1) for y in (k_JKD, v_JKD))))
    query = torch.arange(k.shape[1])[k.shape[1] - q.shape[1] :, None]
    distance = query - torch.arange(k.shape[1])
    visible = (distance >= 0) & (distance < (kind.window or k.shape[1]))
    if not is_causal:
        assert kind.window is None
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    scores = q @ k.transpose(1, 2) * kind.scale
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if kind.softcap is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=kind.scale)
    else:
        out = scores.softmax(-1) @ v
    return out.transpose(0, 1), scores.logsumexp(-1).T


def expected(case):
    """Return out_TND and lse_TN of all rows in float64."""
    outs, lses = zip(*(by_formula(*row, case.kind) for row in case.rows), strict=True)
    return torch.cat(outs), torch.cat(lses)
