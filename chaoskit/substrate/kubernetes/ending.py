"""``python -m chaoskit.substrate.kubernetes.ending JSON`` ends a session.

The undo guard of a killed runner runs it. It ends with an error if the kubeconfig is that of
another server by now.
"""

from __future__ import annotations

import json
import sys

from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.session import end

if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    api = KubernetesApi(arguments["context"], arguments["namespace"], arguments["kubeconfig"])
    if api.server != arguments["server"]:
        sys.exit(f"the session is on {arguments['server']}, but the kubeconfig is for {api.server}")
    end(api, arguments["session"])
