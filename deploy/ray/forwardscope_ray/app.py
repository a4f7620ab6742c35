"""The Ray Serve application, which a config file names as `import_path: forwardscope_ray.app:build`."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from forwardscope_ray.ingress import Ingress
from forwardscope_ray.replica import Replica
from service.settings import Settings

NO_ACCESS_LOG = LoggingConfig(enable_access_log=False)  # each request has a line in the log of its replica
# Settings that replicas cannot have -> what to do instead.
REFUSED = {
    "host": "set http_options.host of the config file",
    "port": "set http_options.port of the config file",
    "header_timeout_seconds": "Ray's proxy reads the headers",
    "write_timeout_seconds": "Ray's proxy writes to the clients",
    "idle_timeout_seconds": "set http_options.keep_alive_timeout_s of the config file",
}
SPARE_REQUESTS = 256  # of a replica above its own limits: for checks, short answers, and refusals with a reason


class Arguments(BaseModel):
    """The arguments of the application, in `args` of a config file. An unknown name is an error."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any] = Field({}, description="settings of the service, named as in service/settings.py")
    replicas: int = Field(1, ge=1, description="number of replicas, and the smallest one for the autoscaler")
    max_replicas: int | None = Field(None, ge=1, description="largest number of replicas; default: no autoscaling")
    upscale_delay_seconds: float = Field(30.0, ge=0, description="how long requests must wait for a new replica")
    downscale_delay_seconds: float = Field(600.0, ge=0, description="how long a replica must be idle to be removed")
    ingresses: int = Field(1, ge=1, description="number of processes that pass requests to replicas")
    cpus: float = Field(1, ge=0, description="CPUs that each process reserves; also its default for `threads`")
    gpus: float = Field(0, ge=0, description="GPUs that each process reserves")
    router: str = Field("forwardscope_ray.router:PrefixRouter", description="class that chooses replicas")
    router_options: dict[str, Any] = Field({}, description="arguments of the router, such as max_load_difference")

    @model_validator(mode="after")
    def _check(self) -> "Arguments":
        settings = Settings(**self.settings)
        for name, advice in REFUSED.items():
            if name in self.settings:
                raise ValueError(f"settings: {name} has no effect behind Ray, so leave it out; {advice}")
        if settings.tensor_parallel > 1 and not self.cpus and not self.gpus:
            raise ValueError(
                "cpus: with tensor_parallel, each process must reserve a CPU or a GPU; set cpus or gpus to 1"
            )
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"max_replicas: {self.max_replicas} is less than replicas, {self.replicas}; leave it out, or raise it"
            )
        return self


def build(arguments: Arguments) -> Application:
    """Describe the deployments to Ray: `Replica` and, in front of it, `Ingress`."""
    settings = Settings(**arguments.settings)
    replicas = serve.deployment(Replica).options(
        name="Replica",
        **number_of_replicas(arguments),
        **resources(arguments, settings),
        # The service has its own queue and answers 429 if it is full, so Ray should not hold requests back.
        max_ongoing_requests=settings.max_num_seqs + settings.max_waiting_requests + SPARE_REQUESTS,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.shutdown_grace_seconds,
        logging_config=NO_ACCESS_LOG,
        health_check_period_s=5,
        health_check_timeout_s=30,
        request_router_config=RequestRouterConfig(
            request_router_class=arguments.router, request_router_kwargs=arguments.router_options
        ),
    )
    ingress = serve.deployment(Ingress).options(
        name="Ingress",
        num_replicas=arguments.ingresses,
        max_ongoing_requests=settings.max_connections,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.shutdown_grace_seconds,
        logging_config=NO_ACCESS_LOG,
    )
    of_replica = arguments.settings | {"cors_origin": []}  # the ingress adds the headers for other sites
    return ingress.bind(replicas.bind(of_replica), arguments.settings)


def resources(arguments: Arguments, settings: Settings) -> dict[str, Any]:
    """The options of Ray for what each replica reserves; with tensor parallelism, for each of its processes."""
    own = {"CPU": arguments.cpus, "GPU": arguments.gpus}
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": own["CPU"], "num_gpus": own["GPU"]}}
    if settings.tensor_parallel > 1:
        bundle = {name: amount for name, amount in own.items() if amount > 0}
        options |= {"placement_group_bundles": [bundle] * settings.tensor_parallel, "placement_group_strategy": "PACK"}
    return options


def number_of_replicas(arguments: Arguments) -> dict[str, Any]:
    """The options of Ray for a fixed or a variable number of replicas."""
    if arguments.max_replicas is None:
        return {"num_replicas": arguments.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=arguments.replicas,
            max_replicas=arguments.max_replicas,
            upscale_delay_s=arguments.upscale_delay_seconds,
            downscale_delay_s=arguments.downscale_delay_seconds,
            policy=AutoscalingPolicy(policy_function="forwardscope_ray.scaling:replicas_for_load"),
        )
    }
