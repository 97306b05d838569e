"""``python -m chaoskit.substrate.kubernetes.ending JSON``: ends a session, for the undo guard of a killed runner."""

from __future__ import annotations

import json
import sys

from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.session import end

if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    api = KubernetesApi(told["context"], told["namespace"], told["kubeconfig"])
    if api.server != told["server"]:
        sys.exit(f"the session is on {told['server']}, and the kubeconfig is of {api.server}")
    end(api, told["session"])
