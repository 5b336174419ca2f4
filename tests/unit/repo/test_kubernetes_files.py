"""The manifests in ``cluster/kubernetes``: their fields, the rules of KubeRay and Kueue, and the commands in them."""

import re
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import distribution
from typing import Any

import jsonschema
import pytest
import yaml

from helpers.files.cluster_files import KUBERNETES, check_ray_command, documents, launched, ray_commands
from helpers.files.kubernetes import KINDS, REGISTRY
from orchestrator.config.secret_names import is_secret
from orchestrator.driver.process.signals import STOP_MARGIN_S

DOCUMENTS = [document for path in sorted(KUBERNETES.glob("*.yaml")) for document in documents(path)]
JOBS = [document for document in DOCUMENTS if document["kind"] == "RayJob"]
QUEUED_JOBS = [job for job in JOBS if "labels" in job["metadata"]]
UNITS = {"": 1.0, "m": 1e-3, "Mi": 2.0**20, "Gi": 2.0**30}
CLUSTERS = {
    f"{d['kind']} {d['metadata']['name']}": d["spec"].get("rayClusterSpec", d["spec"])
    for d in DOCUMENTS
    if d["kind"] in ("RayCluster", "RayJob")
}
MAX_NAME_LENGTH = {"RayCluster": 53, "RayJob": 47}
SERVICE_PORTS = {
    f"{document['metadata']['name']}:{port['port']}"
    for document in DOCUMENTS
    if document["kind"] == "Service"
    for port in document["spec"]["ports"]
}


def identity(document: dict[str, Any]) -> str:
    return f"{document['kind']} {document['metadata']['name']}"


def groups(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def nested(value: Any, key: str) -> Iterator[Any]:
    """All values of ``key``, at any depth."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nested(inner, key)
    if isinstance(value, dict) and key in value:
        yield value[key]


@pytest.mark.parametrize("document", DOCUMENTS, ids=identity)
def test_every_field_exists(document: dict[str, Any]) -> None:
    schema = KINDS[f"{document['apiVersion']} {document['kind']}"]
    errors = jsonschema.Draft202012Validator(schema, registry=REGISTRY).iter_errors(document)
    assert [f"{'.'.join(map(str, e.absolute_path))}: {e.message}" for e in errors] == []


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("restartPolicy", ["Never", "OnFailure"]),
        ("accessModes", [["ReadWriteOnce"], ["ReadWriteMany"]]),
        ("policyTypes", [["Ingress"]]),
        ("strategy", [{"type": "Recreate"}]),
    ],
)
def test_a_value_that_the_schemas_leave_open(key: str, values: list[Any]) -> None:
    found = list(nested(DOCUMENTS, key))
    assert found
    assert [value for value in found if value not in values] == []


def test_every_container_has_an_image_resources_and_short_names_of_its_ports() -> None:
    for container in (container for pod in pods(DOCUMENTS) for container in pod["spec"]["containers"]):
        assert container.keys() >= {"image", "resources"}
        assert all(len(port["name"]) <= 15 for port in container.get("ports", ()))


def test_names_are_unique_and_short_enough() -> None:
    names = [identity(document) for document in DOCUMENTS]
    assert len(names) == len(set(names))
    for document in DOCUMENTS:
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"])
        assert len(document["metadata"]["name"]) <= MAX_NAME_LENGTH.get(document["kind"], 63)


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_the_groups_of_a_ray_cluster(cluster: dict[str, Any]) -> None:
    for group in groups(cluster):
        assert "labels" not in group["rayStartParams"], "KubeRay wants the field `labels` of the group"
        assert not ("resources" in group and group["rayStartParams"].keys() & {"num-cpus", "num-gpus", "resources"})
        check_ray_command("start", [f"--{name}" for name in group["rayStartParams"]])
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "ray-auth-token"}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_the_pods_of_a_ray_cluster(cluster: dict[str, Any]) -> None:
    for group in groups(cluster):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        volumes = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        (shm,) = [volume for volume in pod["volumes"] if volume["name"] == volumes["/dev/shm"]]
        assert shm["emptyDir"]["medium"] == "Memory"
        assert "/outputs" in volumes
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert str(ports["metrics"]) == group["rayStartParams"]["metrics-export-port"]


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """The templates of all pods in a document or several."""
    for key in ("template", "submitterPodTemplate"):
        yield from nested(value, key)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if [*pods(d)]], ids=identity)
def test_every_pod_is_allowed_in_a_restricted_namespace(document: dict[str, Any]) -> None:
    """By the level `restricted` of the Pod Security Standards; KubeRay adds a submitter and an autoscaler."""
    containers = [container for pod in pods(document) for container in pod["spec"]["containers"]]
    if document["kind"] == "RayJob":
        assert "submitterPodTemplate" in document["spec"]
    if document["spec"].get("enableInTreeAutoscaling"):
        containers.append(document["spec"]["autoscalerOptions"])
    for pod in pods(document):
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"]
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers:
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


HERE, OPERATORS, MONITORING, ELSEWHERE = "here", "kuberay", "monitoring", "elsewhere"
RAY = {"ray.io/is-ray-node": "yes"}
SUBMITTER = {"app": "ray-job-submitter"}
OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}


def may_connect(namespace: str, labels: dict[str, str], target: dict[str, str], port: int) -> bool:
    """Whether a pod reaches a port of a pod in the namespace of the manifests, as Kubernetes decides it."""

    def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
        return selector.get("matchLabels", {}).items() <= labels.items()

    def is_meant(peer: dict[str, Any]) -> bool:
        of_pod = selects(peer.get("podSelector", {}), labels)
        if "namespaceSelector" not in peer:
            return of_pod and namespace == HERE
        return of_pod and selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})

    policies = [d["spec"] for d in DOCUMENTS if d["kind"] == "NetworkPolicy"]
    policies = [policy for policy in policies if selects(policy["podSelector"], target)]
    rules = [rule for policy in policies for rule in policy["ingress"]]
    return not policies or any(
        any(map(is_meant, rule["from"])) and port in [p["port"] for p in rule.get("ports", [{"port": port}])]
        for rule in rules
    )


def test_only_those_who_have_to_may_connect() -> None:
    mlflow, postgres = (
        named("Deployment", name)["spec"]["selector"]["matchLabels"] for name in ("mlflow", "mlflow-postgres")
    )
    submitters = [job["spec"]["submitterPodTemplate"]["metadata"]["labels"] for job in JOBS]
    assert submitters == [SUBMITTER] * len(JOBS)
    stranger = {"app": "stranger"}
    for namespace, labels, target, port, expected in (
        (HERE, RAY, RAY, 43210, True),
        (HERE, SUBMITTER, RAY, 8265, True),
        (OPERATORS, OPERATOR, RAY, 8265, True),
        (MONITORING, stranger, RAY, 8080, True),
        (HERE, RAY, mlflow, 5000, True),
        (HERE, mlflow, postgres, 5432, True),
        (HERE, SUBMITTER, RAY, 6379, False),
        (OPERATORS, OPERATOR, RAY, 6379, False),
        (ELSEWHERE, RAY, RAY, 6379, False),
        (HERE, stranger, RAY, 8265, False),
        (ELSEWHERE, stranger, RAY, 8080, False),
        (HERE, stranger, mlflow, 5000, False),
        (HERE, RAY, postgres, 5432, False),
    ):
        assert may_connect(namespace, labels, target, port) is expected, (namespace, labels, target, port)


def test_every_volume_is_mounted_and_every_claim_exists() -> None:
    claims = {d["metadata"]["name"] for d in DOCUMENTS if d["kind"] == "PersistentVolumeClaim"}
    assert all(quantity(named("PersistentVolumeClaim", c)["spec"]["resources"]["requests"]["storage"]) for c in claims)
    for pod in (template["spec"] for template in pods(DOCUMENTS)):
        mounted = {mount["name"] for container in pod["containers"] for mount in container.get("volumeMounts", ())}
        assert {volume["name"] for volume in pod.get("volumes", ())} == mounted
        assert {claim["claimName"] for claim in nested(pod, "persistentVolumeClaim")} <= claims


@pytest.mark.parametrize("job", JOBS, ids=identity)
def test_a_job_can_be_stopped_resumed_and_tried_again(job: dict[str, Any]) -> None:
    spec = job["spec"]
    config = launched(spec["entrypoint"])
    assert config.resume == "auto"
    assert spec["backoffLimit"] > 0
    assert spec["submissionMode"] != "InteractiveMode", "KubeRay refuses backoffLimit there"
    assert spec["shutdownAfterJobFinishes"]
    grace_s = config.cluster.stop_grace_s + STOP_MARGIN_S
    variables = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) >= grace_s
    head, *workers = [group["template"]["spec"] for group in groups(spec["rayClusterSpec"])]
    assert all(pod["terminationGracePeriodSeconds"] >= grace_s for pod in (head, *workers))
    ((stop,),) = [list(nested(head, "command"))]
    assert stop == ["orchestrator", "stop", "last", "--output-dir", config.output_dir, "--wait", stop[-1]]
    assert grace_s <= int(stop[-1]) < head["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("job", JOBS, ids=identity)
def test_a_job_fits_its_cluster(job: dict[str, Any]) -> None:
    config = launched(job["spec"]["entrypoint"])
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    workers = config.strategy.num_workers
    assert isinstance(workers, int)
    assert workers * config.cluster.cpus_per_worker <= group["replicas"] * float(limits["cpu"])
    if config.cluster.device == "cuda":
        assert workers == group["replicas"] * int(limits["nvidia.com/gpu"])
    assert str(config.tracking.uri).removeprefix("http://") in SERVICE_PORTS


def named(kind: str, name: str) -> dict[str, Any]:
    (document,) = [d for d in DOCUMENTS if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return document


def quantity(text: str) -> float:
    """A quantity of Kubernetes as a number."""
    ((number, unit),) = re.findall(r"^([\d.]+)(\w*)$", text)
    return float(number) * UNITS[unit]


@pytest.mark.parametrize("job", QUEUED_JOBS, ids=identity)
def test_the_quota_of_a_queue_has_room_for_its_job(job: dict[str, Any]) -> None:
    queue = named("LocalQueue", job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"])
    (group,) = named("ClusterQueue", queue["spec"]["clusterQueue"])["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert named("ResourceFlavor", flavor["name"])
    assert [resource["name"] for resource in flavor["resources"]] == group["coveredResources"], "as Kueue demands"
    needed: Counter[str] = Counter()
    for pods in groups(job["spec"]["rayClusterSpec"]):
        requests = pods["template"]["spec"]["containers"][0]["resources"]["requests"]
        needed.update({name: pods.get("replicas", 1) * quantity(text) for name, text in requests.items()})
    (submitter,) = job["spec"]["submitterPodTemplate"]["spec"]["containers"]
    needed.update({name: quantity(text) for name, text in submitter["resources"]["requests"].items()})
    assert needed.keys() == set(group["coveredResources"]), "Kueue admits no job that requests anything else"
    quota = {resource["name"]: quantity(resource["nominalQuota"]) for resource in flavor["resources"]}
    assert {name: quota[name] for name in needed if needed[name] > quota[name]} == {}


@pytest.mark.parametrize("job", QUEUED_JOBS, ids=identity)
def test_a_job_in_a_queue_of_kueue(job: dict[str, Any]) -> None:
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert job["spec"]["suspend"]
    assert job["spec"]["shutdownAfterJobFinishes"]
    cluster = job["spec"]["rayClusterSpec"]
    assert not cluster.get("enableInTreeAutoscaling"), "the quota is reserved for a fixed number of pods"
    assert len(cluster["workerGroupSpecs"]) <= 7


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_a_worker_pod_drains_its_node_before_it_ends(cluster: dict[str, Any]) -> None:
    for group in cluster["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        ((*shell, script),) = nested(pod, "command")
        assert shell == ["/bin/sh", "-c"]
        ((name, arguments),) = ray_commands(script)
        assert name == "drain-node"
        check_ray_command(name, arguments)
        (sleep_s,) = re.findall(r"; sleep (\d+)$", script)
        assert int(sleep_s) < pod["terminationGracePeriodSeconds"]


def test_no_secret_is_written_down() -> None:
    variables = [variable for env in nested(DOCUMENTS, "env") for variable in env]
    secret = {v["name"] for v in variables if "valueFrom" in v}
    assert secret == {"PGPASSWORD", "POSTGRES_PASSWORD"}
    assert not [v["name"] for v in variables if "value" in v and is_secret(v["name"])]
    assert not [d for d in DOCUMENTS if d["kind"] == "Secret"]
    assert not re.search(r"://[^/\s]*:[^/\s]*@", "".join(path.read_text() for path in KUBERNETES.glob("*.yaml")))


def test_services_find_their_pods() -> None:
    deployments = [d["spec"] for d in DOCUMENTS if d["kind"] == "Deployment"]
    for service in (d["spec"] for d in DOCUMENTS if d["kind"] == "Service"):
        (deployment,) = [d for d in deployments if d["selector"]["matchLabels"] == service["selector"]]
        assert deployment["template"]["metadata"]["labels"] == service["selector"]
        ports = {p["name"] for p in deployment["template"]["spec"]["containers"][0]["ports"]}
        assert {p["targetPort"] for p in service["ports"]} <= ports


def test_the_mlflow_server_answers_to_its_service_and_finds_its_database() -> None:
    (mlflow,) = [d for d in DOCUMENTS if identity(d) == "Deployment mlflow"]
    command = mlflow["spec"]["template"]["spec"]["containers"][0]["command"]
    options = dict(argument.removeprefix("--").split("=", 1) for argument in command[2:])
    assert "mlflow:5000" in SERVICE_PORTS & set(options["allowed-hosts"].split(","))
    (env,) = nested(mlflow, "env")
    switch = "MLFLOW_SERVER_ENABLE_JOB_EXECUTION"
    assert {"name": switch, "value": "false"} in env, "its processes exceed the limit"
    variables = distribution("mlflow").locate_file("mlflow/environment_variables.py")  # to import it takes seconds
    assert f"\n{switch} = " in variables.read_text()
    host = re.fullmatch(r"postgresql\+psycopg2://mlflow@([\w-]+)/mlflow", options["backend-store-uri"])
    assert f"{host[1]}:5432" in SERVICE_PORTS
