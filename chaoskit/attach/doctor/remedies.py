"""The remedy for a hand that does not work, by the words of the API server, the kubelet or the kernel.

-> ``docs/attach.md``: what each hand needs.
"""

from __future__ import annotations

from chaoskit.attach.hands.hand import HandUnable
from chaoskit.attach.hands.hand_container import NETWORK, PROCESSES, HandRole
from chaoskit.errors import HarnessError

_LEVEL = "set the level of the namespace: pod-security.kubernetes.io/enforce={}"
_POD_LEVEL = "set the level of the namespace to one that admits new pods like those of the job"
#: Level of Pod Security that each hand needs. One on processes needs none if its target is not root.
_LEVELS: dict[HandRole, str] = {PROCESSES: "baseline", NETWORK: "privileged"}
#: Words of a refusal, and the remedy.
_REMEDIES = (
    (
        ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "cannot be pulled"),
        "name an image that the machines can pull (--hand-image), and give the pods the secret of its registry",
    ),
    (("exceeded quota",), "raise the quota of the namespace, or try when the job uses less"),
    (("Unschedulable",), "make room for a small pod on the machine of the job's pod"),
    (
        ("executable file not found", "no such file or directory"),
        "look for the missing program in the image. The throw-away pod needs sh, a hand needs python3 and nft",
    ),
)
_OTHER = "look at the message: an admission of the cluster, the kubelet or the image has caused it"


def remedy_of(error: HarnessError, role: HandRole | None) -> str:
    """Return what would let a hand work.

    Args:
        error: the error of its trial.
        role: role of the hand; None if the throw-away pod itself is the reason.
    """
    if isinstance(error, HandUnable):
        return error.remedy
    text = str(error)
    if "violates PodSecurity" in text:
        return _LEVEL.format(_LEVELS[role]) if role is not None else _POD_LEVEL
    return next(
        (remedy for words, remedy in _REMEDIES if any(word in text for word in words)), _OTHER
    )
