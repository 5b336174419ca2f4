"""The objects of Kubernetes and KubeRay that the manifests use, as JSON schemas.

They have the fields of KubeRay v1.6.2, by its reference of the CRD, and those fields of the core objects that the
manifests use.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
ANY: Schema = {}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def several(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


def fields(required: dict[str, Schema] | None = None, **optional: Schema) -> Schema:
    """An object with these fields and no others."""
    required = required or {}
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def kind(name: str, version: str, spec: Schema) -> Schema:
    metadata = fields({"name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}}, labels=TEXTS)
    return fields({"apiVersion": one_of(version), "kind": one_of(name), "metadata": metadata, "spec": spec})


RESOURCES = fields(requests=TEXTS, limits=TEXTS)
EXEC = fields({"command": several(TEXT)})
PROBE = fields(exec=EXEC, tcpSocket=fields({"port": ANY}))
ENV = fields({"name": TEXT}, value=TEXT, valueFrom=fields({"secretKeyRef": fields({"name": TEXT, "key": TEXT})}))
CONTAINER = fields(
    {"name": TEXT, "image": TEXT, "resources": RESOURCES},
    command=several(TEXT),
    env=several(ENV),
    ports=several(fields({"name": {"type": "string", "maxLength": 15}, "containerPort": NUMBER})),
    lifecycle=fields(preStop=fields({"exec": EXEC})),
    readinessProbe=PROBE,
    volumeMounts=several(fields({"name": TEXT, "mountPath": TEXT})),
)
VOLUME = fields(
    {"name": TEXT},
    persistentVolumeClaim=fields({"claimName": TEXT}),
    emptyDir=fields(medium=one_of("Memory"), sizeLimit=TEXT),
)
POD = fields(
    {
        "spec": fields(
            {"containers": several(CONTAINER)},
            volumes=several(VOLUME),
            terminationGracePeriodSeconds=NUMBER,
            securityContext=fields(runAsNonRoot=FLAG, runAsUser=NUMBER, fsGroup=NUMBER),
        )
    },
    metadata=fields(labels=TEXTS),
)

GROUP = {"rayStartParams": TEXTS, "template": POD}
HEAD_GROUP = fields(GROUP, headService=ANY, enableIngress=FLAG, resources=TEXTS, labels=TEXTS, serviceType=TEXT)
WORKER_GROUP = fields(
    {"groupName": TEXT, "minReplicas": NUMBER, "maxReplicas": NUMBER, **GROUP},
    replicas=NUMBER,
    suspend=FLAG,
    idleTimeoutSeconds=NUMBER,
    resources=TEXTS,
    labels=TEXTS,
    scaleStrategy=ANY,
    numOfHosts=NUMBER,
)
RAY_CLUSTER_SPEC = fields(
    {"headGroupSpec": HEAD_GROUP, "rayVersion": TEXT},
    authOptions=fields(mode=one_of("disabled", "token"), secretName=TEXT, enableK8sTokenAuth=FLAG),
    autoscalerOptions=ANY,
    enableInTreeAutoscaling=FLAG,
    gcsFaultToleranceOptions=ANY,
    headServiceAnnotations=TEXTS,
    managedBy=TEXT,
    suspend=FLAG,
    upgradeStrategy=ANY,
    workerGroupSpecs=several(WORKER_GROUP),
)
RAY_JOB_SPEC = fields(
    {"entrypoint": TEXT},
    activeDeadlineSeconds=NUMBER,
    backoffLimit=NUMBER,
    clusterSelector=TEXTS,
    deletionStrategy=ANY,
    entrypointNumCpus=ANY,
    entrypointNumGpus=ANY,
    entrypointResources=TEXT,
    jobId=TEXT,
    managedBy=TEXT,
    metadata=TEXTS,
    preRunningDeadlineSeconds=NUMBER,
    rayClusterSpec=RAY_CLUSTER_SPEC,
    runtimeEnvYAML=TEXT,
    shutdownAfterJobFinishes=FLAG,
    submissionMode=one_of("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
    submitterConfig=fields(backoffLimit=NUMBER),
    submitterPodTemplate=POD,
    suspend=FLAG,
    ttlSecondsAfterFinished=NUMBER,
)
DEPLOYMENT_SPEC = fields(
    {"replicas": NUMBER, "selector": fields({"matchLabels": TEXTS}), "template": POD},
    strategy=fields({"type": one_of("Recreate", "RollingUpdate")}),
)
SERVICE_SPEC = fields({"selector": TEXTS, "ports": several(fields({"port": NUMBER, "targetPort": ANY}, name=TEXT))})
CLAIM_SPEC = fields(
    {
        "accessModes": several(one_of("ReadWriteOnce", "ReadWriteMany")),
        "resources": fields({"requests": fields({"storage": TEXT})}),
    }
)

KINDS = {
    "RayCluster": kind("RayCluster", "ray.io/v1", RAY_CLUSTER_SPEC),
    "RayJob": kind("RayJob", "ray.io/v1", RAY_JOB_SPEC),
    "Deployment": kind("Deployment", "apps/v1", DEPLOYMENT_SPEC),
    "Service": kind("Service", "v1", SERVICE_SPEC),
    "PersistentVolumeClaim": kind("PersistentVolumeClaim", "v1", CLAIM_SPEC),
}
