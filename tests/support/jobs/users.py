"""Users of the tests' cluster that have only some rights.

-> ``support/nodes/pods.py``: the cluster.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from chaoskit.substrate.kubernetes.api import rights
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.installation import role
from support.nodes import pods


@contextlib.contextmanager
def user_with(directory: Path, granted: tuple[rights.Right, ...]) -> Iterator[KubernetesApi]:
    """Yield the client of a user that has only these rights in the namespace.

    Its ``kubeconfig`` is in the directory.
    """
    metadata = {"namespace": pods.namespace(), "name": "attacher"}
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}
    binding = {
        "apiVersion": f"{rights.RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": metadata,
        "roleRef": {"apiGroup": rights.RBAC, "kind": "Role", "name": "attacher"},
        "subjects": [{"kind": "ServiceAccount", **metadata}],
    }
    with pods.installed([role("attacher", {}, granted), account, binding]):
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        path = f"/api/v1/namespaces/{pods.namespace()}/serviceaccounts/attacher/token"
        token = pods.ask("POST", path, request)["status"]["token"]
        config = msgspec.yaml.decode(Path(os.environ[pods.VARIABLE_OF_TESTS]).read_bytes())
        config["users"] = [
            {"name": user["name"], "user": {"token": token}} for user in config["users"]
        ]
        (directory / "kubeconfig").write_bytes(msgspec.json.encode(config))
        client = KubernetesApi(namespace=pods.namespace(), kubeconfig=str(directory / "kubeconfig"))
        try:
            yield client
        finally:
            client.close()
