"""Elastic policy of a run, as users write it: HyperPod's ``elasticPolicy``, in YAML or JSON.

elasticPolicy:
  minReplicas: 2
  maxReplicas: 8
  replicaIncrementStep: 2                 # or replicaDiscreteValues: [2, 4, 8]
  gracefulShutdownTimeoutInSeconds: 600
  scalingTimeoutInSeconds: 60
  faultyScaleDownTimeoutInSeconds: 30

HyperPod's ``runPolicy.restartPolicy.scaleUpSnoozeTimeInSeconds`` stands beside it, or as a field in
it.

-> elastic/policy.py applies the settings; config.py has the other settings of a run.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from chaoskit.errors import BadInput
from chaoskit.settings_file import parse_yaml

#: The only field that HyperPod has in another place: in ``runPolicy.restartPolicy``.
_SNOOZE = "scaleUpSnoozeTimeInSeconds"


class ElasticPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes between which a world moves, and the speed of its moves. A replica is a node.

    Args:
        min_replicas: smallest world that trains.
        max_replicas: largest world.
        replica_increment_step: distance between sizes, from ``min_replicas`` upwards; 0 counts
            as 1.
        replica_discrete_values: the sizes themselves, in place of a step.
        graceful_shutdown_timeout_s: time after which a node that leaves is evicted.
        scaling_timeout_s: time for which new capacity must be present before it is used.
        faulty_scale_down_timeout_s: time for which the place of a lost node is kept for a
            replacement before the world shrinks.
        scale_up_snooze_time_s: shortest time between two growths.
    """

    min_replicas: int = msgspec.field(name="minReplicas")
    max_replicas: int = msgspec.field(name="maxReplicas")
    replica_increment_step: int = msgspec.field(name="replicaIncrementStep", default=0)
    replica_discrete_values: tuple[int, ...] = msgspec.field(
        name="replicaDiscreteValues", default=()
    )
    graceful_shutdown_timeout_s: float = msgspec.field(
        name="gracefulShutdownTimeoutInSeconds", default=600.0
    )
    scaling_timeout_s: float = msgspec.field(name="scalingTimeoutInSeconds", default=60.0)
    faulty_scale_down_timeout_s: float = msgspec.field(
        name="faultyScaleDownTimeoutInSeconds", default=30.0
    )
    scale_up_snooze_time_s: float = msgspec.field(name=_SNOOZE, default=0.0)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The allowed sizes, smallest first."""
        if self.replica_discrete_values:
            return tuple(sorted(self.replica_discrete_values))
        return tuple(
            range(self.min_replicas, self.max_replicas + 1, self.replica_increment_step or 1)
        )

    @property
    def sizes_in_words(self) -> str:
        """The allowed sizes, in words."""
        sizes = self.sizes
        if len(sizes) > 8 and not self.replica_discrete_values:
            step = self.replica_increment_step
            return f"{sizes[0]} to {sizes[-1]}" + (f" in steps of {step}" if step > 1 else "")
        return ", ".join(map(str, sizes))

    def fit(self, nodes: int) -> int:
        """Return the largest allowed size for so many nodes; 0 if they are too few to train."""
        return max((size for size in self.sizes if size <= nodes), default=0)


def read_policy(data: bytes | str) -> ElasticPolicy:
    """Return the policy in a YAML or JSON text.

    It stands alone, or below ``elasticPolicy``, with ``runPolicy`` beside it.

    Raises:
        BadInput: if it is no such text, or a field is wrong or missing. The error names the field
            as it is spelled there.
    """
    try:
        documents = parse_yaml(data)
    except ValueError as error:
        problem = " ".join(str(error).split())
        raise BadInput("elasticPolicy", data[:40], f"write YAML or JSON ({problem})") from None
    if len(documents) != 1:
        raise BadInput("elasticPolicy", data[:40], f"write one document, not {len(documents)}")
    content = documents[0]
    if isinstance(content, dict) and "elasticPolicy" in content:
        content = _with_snooze(content["elasticPolicy"], content.get("runPolicy"))
    if not isinstance(content, dict):
        raise BadInput("elasticPolicy", content, "write a mapping with minReplicas and maxReplicas")
    try:
        policy = msgspec.convert(content, ElasticPolicy)
    except msgspec.ValidationError as error:
        message, _, location = str(error).partition(" - at `$.")
        field = location.rstrip("`").partition("[")[0] or message.rpartition("field `")[2].rstrip(
            "`"
        )
        raise BadInput(field, content.get(field), f"mend it: {message}") from None
    validate_policy(policy)
    return policy


def _with_snooze(policy: Any, run_policy: Any) -> Any:
    """Return the mapping ``elasticPolicy`` with the snooze of ``runPolicy.restartPolicy``, if any.

    Raises:
        BadInput: if both have a snooze.
    """
    restart_policy = run_policy.get("restartPolicy") if isinstance(run_policy, dict) else None
    if (
        not isinstance(policy, dict)
        or not isinstance(restart_policy, dict)
        or _SNOOZE not in restart_policy
    ):
        return policy
    if _SNOOZE in policy:
        raise BadInput(
            _SNOOZE,
            policy[_SNOOZE],
            "give it once: in elasticPolicy, or in runPolicy.restartPolicy",
        )
    return {**policy, _SNOOZE: restart_policy[_SNOOZE]}


def validate_policy(policy: ElasticPolicy) -> None:
    """Raise BadInput for a policy that cannot work.

    Raises:
        BadInput: naming the field as it is spelled in YAML.
    """
    spelled_names = dict(
        zip(policy.__struct_fields__, policy.__struct_encode_fields__, strict=True)
    )

    def refuse(field: str, remedy: str) -> None:
        refused: Any = getattr(policy, field)
        raise BadInput(spelled_names[field], refused, remedy)

    if policy.min_replicas < 1:
        refuse("min_replicas", "use 1 or more")
    if policy.max_replicas < policy.min_replicas:
        refuse("max_replicas", f"use minReplicas={policy.min_replicas} or more")
    if policy.replica_increment_step < 0:
        refuse("replica_increment_step", "use 1 or more")
    values = policy.replica_discrete_values
    if values and policy.replica_increment_step:
        refuse(
            "replica_increment_step",
            "leave it out, or replicaDiscreteValues: both say which sizes there are",
        )
    if any(not policy.min_replicas <= value <= policy.max_replicas for value in values):
        refuse(
            "replica_discrete_values",
            f"use sizes from {policy.min_replicas} to {policy.max_replicas}",
        )
    for field in spelled_names:
        if field.endswith("_s") and not (0 <= getattr(policy, field) < math.inf):
            refuse(field, "use a number of seconds, 0 or more")
