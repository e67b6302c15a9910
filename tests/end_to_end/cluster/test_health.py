"""The health checks of deploy/kubernetes/ray.yaml: Ray as the extra installs it, without its dashboard, answers them."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.ray_cluster import RayCluster


@pytest.mark.ci
def test_the_head_and_a_node_answer_grpcs_health_check(cluster: RayCluster) -> None:
    for address in (cluster.address, cluster.node_addresses[0]):
        with grpc.insecure_channel(address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
