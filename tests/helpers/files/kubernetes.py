"""The objects of Kubernetes, KubeRay and Kueue that the manifests use, as JSON schemas.

Those of Kubernetes itself come with kubernetes-validate. Those of KubeRay v1.6.2 and of Kueue's v1beta2 have the fields
that the manifests use, by the references of their CRDs.
"""

import json
from importlib.resources import files
from typing import Any

import kubernetes_validate
from referencing import Registry, Resource

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def several(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


def fields(required: dict[str, Schema] | None = None, **optional: Schema) -> Schema:
    """An object with these fields and no others."""
    required = required or {}
    parts = {"properties": {**required, **optional}, "required": list(required)}
    return {"type": "object", **parts, "additionalProperties": False}


FOLDER = f"kubernetes-json-schema/v{kubernetes_validate.latest_version()}-local-strict"
CORE = json.loads((files(kubernetes_validate) / FOLDER / "_definitions.json").read_text())
REGISTRY: Registry[Schema] = Resource.from_contents(CORE) @ Registry()
"""What the references in :data:`KINDS` lead to."""


def core(name: str) -> Schema:
    """An object of Kubernetes itself."""
    return {"$ref": f"{CORE['$id']}#/$defs/io.k8s.api.{name}"}


def kind(**parts: Schema) -> Schema:
    """An object with ``parts`` such as ``spec``."""
    return fields({"apiVersion": TEXT, "kind": TEXT, "metadata": fields({"name": TEXT}, labels=TEXTS), **parts})


POD = core("core.v1.PodTemplateSpec")
WORKER_GROUP = {"groupName": TEXT, "minReplicas": NUMBER, "maxReplicas": NUMBER, "replicas": NUMBER}
RAY_CLUSTER_SPEC = fields(
    {"headGroupSpec": fields({"rayStartParams": TEXTS, "template": POD}), "rayVersion": TEXT},
    authOptions=fields(mode=one_of("disabled", "token"), secretName=TEXT),
    autoscalerOptions=fields(securityContext=core("core.v1.SecurityContext")),
    enableInTreeAutoscaling=FLAG,
    workerGroupSpecs=several(fields({**WORKER_GROUP, "rayStartParams": TEXTS, "template": POD})),
)
RAY_JOB_SPEC = fields(
    {"entrypoint": TEXT},
    backoffLimit=NUMBER,
    rayClusterSpec=RAY_CLUSTER_SPEC,
    runtimeEnvYAML=TEXT,
    shutdownAfterJobFinishes=FLAG,
    submissionMode=one_of("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
    submitterConfig=fields(backoffLimit=NUMBER),
    submitterPodTemplate=POD,
    suspend=FLAG,
    ttlSecondsAfterFinished=NUMBER,
)
QUOTA = fields({"name": TEXT, "nominalQuota": TEXT})
FLAVOR = fields({"name": TEXT, "resources": several(QUOTA)})
CLUSTER_QUEUE_SPEC = fields(
    {"resourceGroups": several(fields({"coveredResources": several(TEXT), "flavors": several(FLAVOR)}))},
    namespaceSelector=fields(),
    preemption=fields(withinClusterQueue=one_of("Never", "LowerPriority", "LowerOrNewerEqualPriority")),
)

KINDS = {
    "v1 PersistentVolumeClaim": core("core.v1.PersistentVolumeClaim"),
    "v1 Service": core("core.v1.Service"),
    "apps/v1 Deployment": core("apps.v1.Deployment"),
    "networking.k8s.io/v1 NetworkPolicy": core("networking.v1.NetworkPolicy"),
    "ray.io/v1 RayCluster": kind(spec=RAY_CLUSTER_SPEC),
    "ray.io/v1 RayJob": kind(spec=RAY_JOB_SPEC),
    "kueue.x-k8s.io/v1beta2 ResourceFlavor": kind(),
    "kueue.x-k8s.io/v1beta2 ClusterQueue": kind(spec=CLUSTER_QUEUE_SPEC),
    "kueue.x-k8s.io/v1beta2 LocalQueue": kind(spec=fields({"clusterQueue": TEXT})),
    "kueue.x-k8s.io/v1beta2 WorkloadPriorityClass": kind(value={"type": "integer"}),
}
