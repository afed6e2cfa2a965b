"""The rules about what is legal but often a mistake, by what they look at, in the order of their warnings.

A rule yields sentences, has a name for what it doubts, and is in the module of its subject. Rules about
single rows are in `realhf.data.doubtful_rows`. Experiments, losses, rewards and shapings have doubts of their
own, for which rules ask them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from realhf.calls import Generate
from realhf.data.tokenized import TokenizedDataset, TokenizedRows
from realhf.experiment import Role
from realhf.graph import DataflowGraph
from realhf.runtime.compile.checks import language_models
from realhf.runtime.compile.program import Program
from realhf.runtime.doubts import chats, data, held_out, models, rewards, sampling, training
from realhf.runtime.doubts.data import named_parts

Warnings = Iterable[str]

ABOUT_ROLES: tuple[Callable[[Mapping[str, Role]], Warnings], ...] = (
    models.other_bases, models.unread_weights, models.doubled_weights)
ABOUT_PROGRAMS: tuple[Callable[[Program], Warnings], ...] = (
    models.untrained_scores, models.contrary_fields, models.misspelt_fields, training.idle_ranks,
    held_out.unevaluated, training.unclear_rollouts, sampling.off_policy, rewards.faulty_rewards,
    sampling.written_escapes, sampling.unlike_training, data.odd_arrays)
WITHOUT_LANGUAGE_MODELS: tuple[Callable[[Program], Warnings], ...] = (
    training.idle_ranks, training.of_the_algorithm, training.unchanged_graph, training.filling_pools,
    data.odd_arrays)
"""Of the rules about programs, those that count without language models, too."""
ABOUT_TEMPLATES: tuple[Callable[[Program], Warnings], ...] = (chats.two_templates, chats.other_templates)
"""They count if rows are chats."""
ABOUT_TRAINING: tuple[Callable[[Program], Warnings], ...] = (
    sampling.random_samples, sampling.equal_samples, sampling.coarse_weights, training.of_the_algorithm,
    training.unchanged_graph, training.filling_pools, training.unusual_training, rewards.unweighted,
    rewards.idle_shaping)
ABOUT_TRAINING_ROWS: tuple[Callable[[Program, TokenizedDataset], Warnings], ...] = (
    training.repeated_rows, training.doubted_losses)
ABOUT_TRAINING_PARTS: tuple[Callable[[str, TokenizedRows], Warnings], ...] = (data.equal_rows,)
"""They look at the parts of the training data."""
ABOUT_HELD_OUT_ROWS: tuple[Callable[[str, TokenizedDataset, TokenizedDataset], Warnings], ...] = (
    held_out.shared_rows, held_out.other_prompts, held_out.unmapped_rows, held_out.sorted_file)
"""They compare the held-out rows of this name with those of training."""
ABOUT_GRAPHS: tuple[Callable[[Program, DataflowGraph], Warnings], ...] = (
    sampling.ignored, sampling.endless, models.turn_ends)
ABOUT_ROWS: tuple[Callable[[str, TokenizedRows], Warnings], ...] = (
    data.mixed_types, data.left_out, data.null_columns, chats.unlike_template, data.missing_parts,
    data.mixed_splits, data.equal_pairs, data.contrary_answers, data.whole_floats, data.lost_characters,
    data.unknown_text, data.doubtful_rows, chats.unused_settings, data.blank_answers)
ABOUT_READERS: tuple[Callable[[Program, DataflowGraph, str, TokenizedRows], Warnings], ...] = (
    data.contradictions, sampling.ordinary_ends, chats.other_ends, rewards.doubted_rewards,
    models.beyond_positions, sampling.unknown_end)
"""They look at rows and at the graph that reads them."""


def warnings_of(
    program: Program, rows: TokenizedDataset | None, held_out: Mapping[str, TokenizedDataset | None]
) -> list[str]:
    """Return warnings, one sentence each; `rows` are a whole dataset, or in `realhf check` a sample of it.

    `held_out` has the rows of each held-out set by its name.
    """
    program = replace(program, roles=language_models(program.roles))
    if not program.roles:
        return list(dict.fromkeys(_follow(WITHOUT_LANGUAGE_MODELS, program)))
    sets = [(one.field, one.graph, held_out.get(one.name)) for one in program.evaluations]
    warnings = _follow(ABOUT_ROLES, program.roles)
    warnings += _follow(ABOUT_PROGRAMS, program)
    if rows is not None and any(part.counts.chats for part in rows.parts):
        warnings += _follow(ABOUT_TEMPLATES, program)
    if program.parts:  # The program trains.
        warnings += _follow(ABOUT_TRAINING, program)
        if rows is not None:
            warnings += _follow(ABOUT_TRAINING_ROWS, program, rows)
            for name, part in named_parts("dataset", rows):
                warnings += _follow(ABOUT_TRAINING_PARTS, name, part)
            for field, _, of_set in sets:
                if of_set is not None:
                    warnings += _follow(ABOUT_HELD_OUT_ROWS, field, of_set, rows)
    read: list[tuple[str, TokenizedRows]] = []
    for field, graph, of_field in [("dataset", program.graph, rows), *sets]:
        warnings += _follow(ABOUT_GRAPHS, program, graph)
        # An environment's start is a chat, also where the row's prompt is text.
        has_environment = any(work.environment is not None for work in graph.works(Generate))
        for name, part in named_parts(field, of_field):
            if not has_environment:
                read.append((name, part))
            warnings += _follow(ABOUT_ROWS, name, part)
            warnings += _follow(ABOUT_READERS, program, graph, name, part)
    warnings += chats.plain_texts(read)
    return list(dict.fromkeys(warnings))


def _follow(rules: Iterable[Callable[..., Warnings]], *seen: object) -> list[str]:
    return [sentence for rule in rules for sentence in rule(*seen)]
