"""The fields of the kinds in `deploy/kubernetes/` that are not part of Kubernetes itself, as JSON Schemas.

They follow the documentation of Gateway API 1.x, Gateway API Inference Extension 1.6, llm-d-router 0.9, KEDA 2.x, the
Prometheus Operator 0.9x and kustomize 5. Fields that the manifests have no use for are left out, so they are errors
here. In `record`, a field whose name ends with an underscore is required.
"""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
YES: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
SECONDS: Schema = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h))+$"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}


def record(**fields: Schema) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {name.rstrip("_"): schema for name, schema in fields.items()},
        "required": [name.rstrip("_") for name in fields if name.endswith("_")],
    }


def many(item: Schema, least: int = 1) -> Schema:
    return {"type": "array", "minItems": least, "items": item}


def one_of(*words: str) -> Schema:
    return {"enum": list(words)}


def resource(spec: Schema) -> Schema:
    metadata = record(name_=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS)
    return record(apiVersion_=TEXT, kind_=TEXT, metadata_=metadata, spec_=spec)


LABELS = record(matchLabels_={**TEXTS, "minProperties": 1})

INFERENCE_POOL = record(
    selector_=LABELS,
    targetPorts_={**many(record(number_=PORT)), "maxItems": 8},
    appProtocol=one_of("http", "kubernetes.io/h2c"),
    endpointPickerRef=record(
        group={"type": "string"},
        kind=TEXT,
        name_=TEXT,
        port=record(number_=PORT),
        failureMode=one_of("FailOpen", "FailClose"),
    ),
)
INFERENCE_OBJECTIVE = record(poolRef_=record(group=TEXT, kind=TEXT, name_=TEXT), priority={"type": "integer"})

REFERENCE = {"group": {"type": "string"}, "kind": TEXT, "namespace": TEXT, "name_": TEXT}
HTTP_ROUTE = record(
    parentRefs=many(record(**REFERENCE, sectionName=TEXT, port=PORT)),
    hostnames=many(TEXT),
    rules=many(
        record(
            name=TEXT,
            matches=many(
                record(
                    path=record(type=one_of("Exact", "PathPrefix", "RegularExpression"), value=TEXT),
                    headers=many(record(type=one_of("Exact", "RegularExpression"), name_=TEXT, value_=TEXT)),
                    method=TEXT,
                )
            ),
            backendRefs=many(record(**REFERENCE, port=PORT, weight=COUNT)),
            timeouts=record(request=SECONDS, backendRequest=SECONDS),
        )
    ),
)

SERVICE_MONITOR = record(
    selector_=LABELS,
    endpoints_=many(
        record(port=TEXT, path=TEXT, interval=SECONDS, scrapeTimeout=SECONDS, scheme=TEXT, honorLabels=YES)
    ),
    namespaceSelector=record(any=YES, matchNames=many(TEXT)),
    jobLabel=TEXT,
    targetLabels=many(TEXT),
    podTargetLabels=many(TEXT),
)

POLICY = record(
    type_=one_of("Pods", "Percent"), value_=PORT, periodSeconds_={"type": "integer", "minimum": 1, "maximum": 1800}
)
SCALING = record(
    stabilizationWindowSeconds={**COUNT, "maximum": 3600},
    selectPolicy=one_of("Max", "Min", "Disabled"),
    policies=many(POLICY),
)
PROMETHEUS_TRIGGER = record(  # the values of a trigger are texts
    serverAddress_=TEXT,
    query_=TEXT,
    threshold_={**TEXT, "pattern": r"^[0-9]+(\.[0-9]+)?$"},
    activationThreshold=TEXT,
    namespace=TEXT,
    ignoreNullValues=one_of("true", "false"),
    unsafeSsl=one_of("true", "false"),
    timeout=TEXT,
)
SCALED_OBJECT = record(
    scaleTargetRef_=record(apiVersion=TEXT, kind=TEXT, name_=TEXT, envSourceContainerName=TEXT),
    pollingInterval=COUNT,
    cooldownPeriod=COUNT,
    initialCooldownPeriod=COUNT,
    idleReplicaCount=COUNT,
    minReplicaCount=COUNT,
    maxReplicaCount=COUNT,
    fallback=record(failureThreshold_=COUNT, replicas_=COUNT, behavior=TEXT),
    triggers_=many(
        record(
            type_=one_of("prometheus"),
            name=TEXT,
            metricType=one_of("AverageValue", "Value", "Utilization"),
            useCachedMetrics=YES,
            metadata_=PROMETHEUS_TRIGGER,
            authenticationRef=record(name_=TEXT, kind=TEXT),
        )
    ),
    advanced=record(
        restoreToOriginalReplicaCount=YES,
        horizontalPodAutoscalerConfig=record(name=TEXT, behavior=record(scaleUp=SCALING, scaleDown=SCALING)),
    ),
)

PLUGIN_REF = {"pluginRef_": TEXT}
ENGINE = record(
    name_=TEXT,
    queuedRequestsSpec=TEXT,
    runningRequestsSpec=TEXT,
    kvUsageSpec=TEXT,
    loraSpec=TEXT,
    cacheInfoSpec=TEXT,
    cacheBlockSizeLabelName=TEXT,
    cacheNumBlocksLabelName=TEXT,
)
PLUGINS = {  # the parameters of each plugin
    "metrics-data-source": record(scheme=one_of("http", "https"), path=TEXT, insecureSkipVerify=YES),
    "core-metrics-extractor": record(engineLabelKey=TEXT, defaultEngine=TEXT, engineConfigs=many(ENGINE)),
    "queue-scorer": record(),
    "kv-cache-utilization-scorer": record(),
    "prefix-cache-scorer": record(prefixMatchInfoProducerName=TEXT),
    "lora-affinity-scorer": record(),
}
ENDPOINT_PICKER_CONFIG = record(
    apiVersion_=TEXT,
    kind_=TEXT,
    featureGates=many(TEXT),
    plugins_=many(
        {"oneOf": [record(name=TEXT, type_=one_of(name), parameters=schema) for name, schema in PLUGINS.items()]}
    ),
    schedulingProfiles_=many(record(name_=TEXT, plugins_=many(record(**PLUGIN_REF, weight={"type": "number"})))),
    dataLayer=record(injectDefaults=YES, sources=many(record(**PLUGIN_REF, extractors_=many(record(**PLUGIN_REF))))),
)

PATCHES = many(record(path=TEXT, patch=TEXT, target=record(kind=TEXT, name=TEXT)))
KUSTOMIZATION = record(
    apiVersion_=TEXT,
    kind_=TEXT,
    namespace=TEXT,
    resources=many(TEXT),
    configMapGenerator=many(
        record(name_=TEXT, behavior=one_of("create", "replace", "merge"), literals=many(TEXT), files=many(TEXT))
    ),
    images=many(record(name_=TEXT, newName=TEXT, newTag=TEXT, digest=TEXT)),
    components=many(TEXT),
    patches=PATCHES,
)

FIELDS: dict[tuple[str, str], Schema] = {
    ("inference.networking.k8s.io/v1", "InferencePool"): resource(INFERENCE_POOL),
    ("llm-d.ai/v1alpha2", "InferenceObjective"): resource(INFERENCE_OBJECTIVE),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): resource(HTTP_ROUTE),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): resource(SERVICE_MONITOR),
    ("keda.sh/v1alpha1", "ScaledObject"): resource(SCALED_OBJECT),
    ("llm-d.ai/v1alpha1", "EndpointPickerConfig"): ENDPOINT_PICKER_CONFIG,
    ("kustomize.config.k8s.io/v1beta1", "Kustomization"): KUSTOMIZATION,
    ("kustomize.config.k8s.io/v1alpha1", "Component"): record(apiVersion_=TEXT, kind_=TEXT, patches_=PATCHES),
}
