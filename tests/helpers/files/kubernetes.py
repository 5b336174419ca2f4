"""The objects of Kubernetes, KubeRay and Kueue that the manifests use, as JSON schemas.

They have the fields of KubeRay v1.6.2 and of Kueue's v1beta2, by their references of the CRDs, and those fields of the
core objects that the manifests use.
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


def kind(name: str, version: str, **parts: Schema) -> Schema:
    """An object of this kind, with ``parts`` such as ``spec``."""
    metadata = fields({"name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}}, labels=TEXTS)
    return fields({"apiVersion": one_of(version), "kind": one_of(name), "metadata": metadata, **parts})


RESOURCES = fields(requests=TEXTS, limits=TEXTS)
EXEC = fields({"command": several(TEXT)})
PROBE = fields(exec=EXEC, tcpSocket=fields({"port": ANY}))
ENV = fields({"name": TEXT}, value=TEXT, valueFrom=fields({"secretKeyRef": fields({"name": TEXT, "key": TEXT})}))
CONFINEMENT = fields({"allowPrivilegeEscalation": FLAG, "capabilities": fields(drop=several(TEXT))})
CONTAINER = fields(
    {"name": TEXT, "image": TEXT, "resources": RESOURCES},
    securityContext=CONFINEMENT,
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
            restartPolicy=one_of("Never", "OnFailure"),
            securityContext=fields(
                runAsNonRoot=FLAG,
                runAsUser=NUMBER,
                fsGroup=NUMBER,
                seccompProfile=fields({"type": one_of("RuntimeDefault")}),
            ),
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
    autoscalerOptions=fields(securityContext=CONFINEMENT),
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

SELECTOR = fields(matchLabels=TEXTS)
NETWORK_POLICY_SPEC = fields(
    {
        "podSelector": SELECTOR,
        "policyTypes": several(one_of("Ingress", "Egress")),
        "ingress": several(
            fields(
                {"from": several(fields(podSelector=SELECTOR, namespaceSelector=SELECTOR))},
                ports=several(fields({"port": NUMBER})),
            )
        ),
    }
)

QUOTA = fields({"name": TEXT, "nominalQuota": TEXT}, borrowingLimit=TEXT, lendingLimit=TEXT)
RESOURCE_GROUP = fields(
    {"coveredResources": several(TEXT), "flavors": several(fields({"name": TEXT, "resources": several(QUOTA)}))}
)
CLUSTER_QUEUE_SPEC = fields(
    {"resourceGroups": several(RESOURCE_GROUP)},
    admissionChecksStrategy=ANY,
    admissionScope=ANY,
    cohortName=TEXT,
    concurrentAdmissionPolicy=ANY,
    fairSharing=ANY,
    flavorFungibility=ANY,
    namespaceSelector=ANY,
    preemption=fields(
        withinClusterQueue=one_of("Never", "LowerPriority", "LowerOrNewerEqualPriority"),
        reclaimWithinCohort=one_of("Never", "LowerPriority", "Any"),
        borrowWithinCohort=ANY,
    ),
    queueingStrategy=one_of("StrictFIFO", "BestEffortFIFO"),
    stopPolicy=one_of("None", "Hold", "HoldAndDrain"),
)
LOCAL_QUEUE_SPEC = fields({"clusterQueue": TEXT}, fairSharing=ANY, stopPolicy=TEXT, wallTimePolicy=ANY)
KUEUE = "kueue.x-k8s.io/v1beta2"

KINDS = {
    "RayCluster": kind("RayCluster", "ray.io/v1", spec=RAY_CLUSTER_SPEC),
    "RayJob": kind("RayJob", "ray.io/v1", spec=RAY_JOB_SPEC),
    "Deployment": kind("Deployment", "apps/v1", spec=DEPLOYMENT_SPEC),
    "NetworkPolicy": kind("NetworkPolicy", "networking.k8s.io/v1", spec=NETWORK_POLICY_SPEC),
    "Service": kind("Service", "v1", spec=SERVICE_SPEC),
    "PersistentVolumeClaim": kind("PersistentVolumeClaim", "v1", spec=CLAIM_SPEC),
    "ResourceFlavor": kind("ResourceFlavor", KUEUE),
    "ClusterQueue": kind("ClusterQueue", KUEUE, spec=CLUSTER_QUEUE_SPEC),
    "LocalQueue": kind("LocalQueue", KUEUE, spec=LOCAL_QUEUE_SPEC),
    "WorkloadPriorityClass": kind("WorkloadPriorityClass", KUEUE, value={"type": "integer"}),
}
