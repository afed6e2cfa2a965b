"""Downloads what an experiment names on the Hugging Face hub before its processes start. Free of torch."""

from realhf.errors import naming
from realhf.experiment import Experiment
from realhf.user_input.hub import find_model


def fetch_models(experiment: Experiment, *, weights: bool) -> None:
    """Download the models, adapters and tokenizers with names of the hub that are not in its cache.

    Without `weights`, download only configs and tokenizers. Raises UserError, which names the field.
    """
    try:
        roles = experiment.roles()
        names = experiment.hub_names()
    except (Exception, SystemExit):  # Compiling the experiment raises it again, with a better sentence.
        return
    drawn = {f"{name}.model" for name, role in roles.items() if role.random_init}
    for field, name in names.items():
        with naming(field):
            find_model(name, weights=weights and field != "tokenizer" and field not in drawn)
