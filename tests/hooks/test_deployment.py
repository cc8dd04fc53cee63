"""The settings of docs/deployment.md for Kubernetes and YARN, checked with Spark's own code and without a cluster."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import Any

import pytest

from airflow_kafka_spark.hooks.spark.health import find_unreachable_reason
from airflow_kafka_spark.hooks.spark.hook import SparkHook
from tests.support.documents import read_code


@pytest.fixture(scope="module")
def spark():
    """The session of the test process, for its JVM."""
    from tests.sources.contract import spark_session

    return spark_session()


@contextmanager
def default_profile(jvm: Any, conf: Any):
    """Return the resources of executors that Spark takes from these settings."""
    profiles = getattr(getattr(jvm.org.apache.spark.resource, "ResourceProfile$"), "MODULE$")
    profiles.clearDefaultProfile()
    try:
        yield profiles.getOrCreateDefaultProfile(conf)
    finally:
        profiles.clearDefaultProfile()


def executor_pod(jvm: Any, settings: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod that Spark would ask Kubernetes for, and its container."""
    conf = jvm.org.apache.spark.SparkConf(False)
    for name, value in settings.items():
        conf.set(name, value)
    none = jvm.scala.Option.empty()
    security = getattr(getattr(jvm.org.apache.spark, "SecurityManager$"), "MODULE$")
    manager = jvm.org.apache.spark.SecurityManager(conf, none, getattr(security, "$lessinit$greater$default$3")())
    executor = jvm.org.apache.spark.deploy.k8s.KubernetesExecutorConf(conf, "spark-application", "1", none, 0)
    builder = jvm.org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBuilder()
    client = jvm.io.fabric8.kubernetes.client.KubernetesClientBuilder().build()
    try:
        with default_profile(jvm, conf) as profile:
            made = builder.buildFromFeatures(executor, manager, client, profile).pod()
    finally:
        client.close()
    as_json = jvm.io.fabric8.kubernetes.client.utils.Serialization.asJson
    return json.loads(as_json(made.pod())), json.loads(as_json(made.container()))


def test_spark_makes_the_executors_pod_of_the_documented_connection_and_template(spark, monkeypatch, tmp_path):
    template = tmp_path / "executor-pod.yaml"
    template.write_text(read_code("deployment.md", "yaml", "name: spark-kubernetes-executor"))
    connection = json.loads(read_code("deployment.md", "json", "spark.kubernetes.namespace"))
    connection["extra"]["spark.kubernetes.executor.podTemplateFile"] = str(template)
    monkeypatch.setenv("AIRFLOW_CONN_K8S", json.dumps(connection))
    hook = SparkHook("k8s")
    assert hook.master == "k8s://https://kubernetes.default.svc"
    # Spark sets these three when the driver starts; SPARK_LOCAL_HOSTNAME is the last of them.
    started = {"spark.app.name": hook.app_name, "spark.master": hook.master, "spark.driver.host": "10.1.2.3"}
    pod, container = executor_pod(spark._jvm, {**hook.make_settings(), **started})

    assert pod["spec"]["securityContext"] == {"fsGroup": 185, "runAsNonRoot": True, "runAsUser": 185}
    assert pod["spec"]["terminationGracePeriodSeconds"] == 60
    assert pod["spec"]["serviceAccountName"] == "airflow-spark"
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["image"] == connection["extra"]["spark.kubernetes.container.image"]
    assert container["resources"] == {"limits": {"memory": "4096Mi"}, "requests": {"memory": "4096Mi", "cpu": "2"}}
    (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == "/etc/kafka/certificates"]
    assert {"name": mount["name"], "secret": {"secretName": "kafka-certificates"}} in pod["spec"]["volumes"]
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert environment["SPARK_DRIVER_URL"] == "spark://CoarseGrainedScheduler@10.1.2.3:40000"
    assert "-Dspark.driver.blockManager.port=40020" in environment.values()


@pytest.mark.parametrize("name", ["HADOOP_CONF_DIR", "YARN_CONF_DIR"])
def test_without_hadoops_configuration_yarn_is_said_to_be_unreachable(monkeypatch, name):
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("YARN_CONF_DIR", raising=False)
    assert (
        find_unreachable_reason("yarn") == "Neither HADOOP_CONF_DIR nor YARN_CONF_DIR is set in the environment of this process"
    )
    monkeypatch.setenv(name, "/etc/hadoop/conf")
    assert find_unreachable_reason("yarn") == ""
