"""Read and validate the query of a GET request as strictly as a JSON body: see bodies.py."""

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from service.http.bodies import shape_error
from service.http.errors import wrong_shape
from service.http.field_names import check_names

Query = TypeVar("Query", bound=BaseModel)


def read_query(request: Request, model: type[Query]) -> Query:
    """The parameters of a query. Raises 422 for an unknown one, a wrong value, and one that occurs twice."""
    values: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in values:
            raise wrong_shape(name[:100], "occurs twice in the query; send it once", "duplicate_key")
        values[name] = value
    check_names(values, model)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise shape_error(error, model) from None


def query_parameters(model: type[BaseModel]) -> dict[str, Any]:
    """The description of a query for the OpenAPI page."""
    parameters = []
    for name, schema in model.model_json_schema()["properties"].items():
        options = schema.pop("anyOf", [])
        schema |= next((option for option in options if option != {"type": "null"}), {})
        if schema.get("default", "") is None:
            del schema["default"]
        parameter = {"name": name, "in": "query", "required": False, "description": schema.pop("description", "")}
        parameters.append({**parameter, "schema": schema})
    return {"parameters": parameters}
