//! The API door's description, as OpenAPI 3.1.
//!
//! Made from the routes ([`ROUTES`]) and the vocabulary ([`VOCABULARY`]), so that neither can have a member that the
//! description lacks. `docs/openapi.json` is a copy for readers; a test holds it to this.

use super::{
    api::{Operation, Route, MAX_FILE, ROUTES},
    request::{MAX_JSON, MAX_READ},
};
use crate::effect::{Declaration, Kind, VOCABULARY};
use serde_json::{json, Map, Value};
use std::sync::OnceLock;

/// The document.
pub fn document() -> &'static Value {
    static DOCUMENT: OnceLock<Value> = OnceLock::new();
    DOCUMENT.get_or_init(build)
}

fn build() -> Value {
    let mut paths = Map::new();
    for route in ROUTES {
        let methods = paths.entry(route.path).or_insert_with(|| json!({}));
        methods[route.method.to_ascii_lowercase()] = operation(route);
    }
    let kinds: Vec<&Declaration> = VOCABULARY.iter().filter(|row| row.at_api_door).collect();
    let mut schemas = schemas();
    for row in &kinds {
        schemas.insert(schema_name(row), kind_schema(row));
    }
    let one_of: Vec<Value> = kinds.iter().map(|row| reference(&schema_name(row))).collect();
    let mapping: Map<String, Value> = kinds
        .iter()
        .map(|row| (row.name.to_owned(), format!("#/components/schemas/{}", schema_name(row)).into()))
        .collect();
    schemas.insert(
        "Effect".to_owned(),
        json!({"oneOf": one_of, "discriminator": {"propertyName": "kind", "mapping": mapping}}),
    );
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Tollgate, the API door",
            "version": "1",
            "summary": "What a jailed program can ask for, on the Unix socket that $TOLLGATE_SOCKET names.",
            "description": "The socket a request arrives on says who asks. A request that names its own subject is \
                refused. Every effect, and every request that is none, has a receipt.",
        },
        "servers": [{"url": "http://localhost/", "description": "by way of $TOLLGATE_SOCKET"}],
        "paths": paths,
        "components": {"schemas": schemas},
    })
}

fn operation(route: &Route) -> Value {
    let mut operation = json!({
        "summary": route.summary,
        "responses": {
            "200": success(route.operation),
            "400": problem("What was sent is not exactly a request."),
        },
    });
    let responses = &mut operation["responses"];
    match route.operation {
        Operation::Effect | Operation::ReadFile | Operation::WriteFile => {
            responses["403"] = problem("Refused by a handler, or by the system on the world's side.");
            responses["404"] = problem("The object does not exist.");
            responses["409"] = problem("The object is not what was expected.");
            responses["413"] = problem("Longer than this door or the file system takes.");
            responses["422"] = problem("The object is of a kind to which this cannot be done.");
            responses["500"] = problem("A fault of Tollgate or of the machine; or the effect is in doubt.");
            responses["507"] = problem("A quota or the disk is used up.");
        }
        Operation::Myself | Operation::Budget | Operation::Why | Operation::Describe => {}
    }
    match route.operation {
        Operation::Effect => {
            operation["operationId"] = "effect".into();
            operation["requestBody"] = json!({
                "required": true,
                "description": format!("At most {MAX_JSON} bytes."),
                "content": {"application/json": {"schema": reference("Effect")}},
            });
        }
        Operation::ReadFile => {
            operation["operationId"] = "readFile".into();
            operation["parameters"] = json!([
                file_path(),
                query("offset", integer("Where to begin, in bytes.", 0, None), false),
                query("limit", integer("At most this many bytes.", 0, Some(MAX_READ)), false),
            ]);
        }
        Operation::WriteFile => {
            operation["operationId"] = "writeFile".into();
            operation["parameters"] =
                json!([file_path(), query("mode", mode(), false), query("expect", expect(), false)]);
            operation["requestBody"] = json!({
                "required": true,
                "description": format!("The content, of announced length, at most {MAX_FILE} bytes."),
                "content": {"application/octet-stream": {}},
            });
            responses_411(&mut operation);
        }
        Operation::Myself => operation["operationId"] = "self".into(),
        Operation::Budget => operation["operationId"] = "budget".into(),
        Operation::Describe => operation["operationId"] = "describe".into(),
        Operation::Why => {
            operation["operationId"] = "why".into();
            let asked = |kind: Kind| crate::chain::admission::is_network(kind);
            let kinds = VOCABULARY.iter().filter(|row| row.at_api_door || asked(row.kind));
            let kinds: Vec<&str> = kinds.map(|row| row.name).collect();
            operation["description"] =
                "Takes the fields of the kind as parameters. A content is not needed; `bytes` stands for its length."
                    .into();
            operation["parameters"] = json!([
                query("kind", json!({"enum": kinds}), true),
                query("path", path(), false),
                query("to", text("Where a file is moved to, or the HOST:PORT of a connection."), false),
                query("method", text("The method of a request; GET if there is none."), false),
                query("url", text("The URL of a request."), false),
                query("name", text("A name that is asked for."), false),
                query("id", text("A run's id."), false),
                query("bytes", integer("The length of the content.", 0, None), false),
                query("command", json!({"type": "array", "items": {"type": "string"}}), false),
            ]);
        }
    }
    operation
}

fn responses_411(operation: &mut Value) {
    operation["responses"]["411"] = problem("The body's length is not announced.");
}

fn success(operation: Operation) -> Value {
    let content = match operation {
        Operation::Effect | Operation::WriteFile => json!({"application/json": {"schema": reference("Done")}}),
        Operation::ReadFile => json!({"application/octet-stream": {}}),
        Operation::Myself => json!({"application/json": {"schema": reference("Self")}}),
        Operation::Budget => json!({"application/json": {"schema": reference("Budget")}}),
        Operation::Why => json!({"application/json": {"schema": reference("Opinion")}}),
        Operation::Describe => json!({"application/json": {"schema": {"type": "object"}}}),
    };
    json!({"description": "Done, or told.", "content": content})
}

fn problem(description: &str) -> Value {
    json!({"description": description, "content": {"application/json": {"schema": reference("Error")}}})
}

fn schema_name(row: &Declaration) -> String {
    row.name.replace('/', "-")
}

/// A kind's fields. Matched without a wildcard, so that a new kind is described or does not compile.
fn fields(kind: Kind) -> (Value, &'static [&'static str]) {
    match kind {
        Kind::FsRead => (
            json!({
                "path": path(),
                "offset": integer("Where to begin, in bytes.", 0, None),
                "limit": integer("At most this many bytes.", 0, Some(MAX_READ)),
            }),
            &["path"],
        ),
        Kind::FsList => (json!({"path": path()}), &["path"]),
        Kind::FsWrite => (
            json!({
                "path": path(),
                "type": {"enum": ["file", "directory", "link", "attributes"], "default": "file"},
                "text": text("A file's content, as UTF-8. Either this or `content`."),
                "content": text("A file's content, in base64 with padding."),
                "target": text("A link's target, written as a path is."),
                "mode": mode(),
                "expect": expect(),
            }),
            &["path"],
        ),
        Kind::FsDelete => (json!({"path": path(), "expect": expect()}), &["path"]),
        Kind::FsMove => (json!({"path": path(), "to": path()}), &["path", "to"]),
        Kind::RunStart => (
            json!({
                "command": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                "policy": text("A policy's name; empty for the run's own."),
                "directory": text("The working directory; empty for the workspace."),
                "environment": {"type": "array", "items": {"type": "string"}, "description": "Names, never values."},
            }),
            &["command"],
        ),
        Kind::RunCancel => (json!({"id": text("The run; absent for this one.")}), &[]),
        Kind::EvalRun => (
            json!({
                "label": {"type": "string", "maxLength": 256, "description": "What was evaluated."},
                "cpu_us": integer("Processor time in microseconds.", 0, None),
                "wall_us": integer("Wall time in microseconds.", 0, None),
            }),
            &["label", "cpu_us", "wall_us"],
        ),
        Kind::NetConnect
        | Kind::NetResolve
        | Kind::NetAccept
        | Kind::HttpRequest
        | Kind::ProcessExec
        | Kind::ProcessSyscall
        | Kind::ApiRequest => (json!({}), &[]),
    }
}

fn kind_schema(row: &Declaration) -> Value {
    let (mut properties, required) = fields(row.kind);
    properties["kind"] = json!({"const": row.name});
    let required: Vec<&str> = ["kind"].into_iter().chain(required.iter().copied()).collect();
    json!({
        "type": "object",
        "description": row.summary,
        "properties": properties,
        "required": required,
        "additionalProperties": false,
        "x-classes": row.classes,
        "x-idempotency": row.idempotency,
        "x-resource": row.resource,
    })
}

fn schemas() -> Map<String, Value> {
    let number = json!({"type": ["integer", "null"], "minimum": 0});
    let schemas = json!({
        "Done": {
            "type": "object",
            "properties": {
                "decision": {"enum": ["allowed", "answered", "planned"]},
                "decided_by": text("The handler that decided, or `world`."),
                "value": {"description": "The result, as the kind has one."},
                "bytes": integer("Bytes read or written.", 0, None),
                "digest": text("SHA-256 of the result, in hexadecimal."),
                "content": text("The bytes that were read, in base64 with padding."),
            },
            "required": ["decision", "decided_by", "value", "bytes"],
        },
        "Error": {
            "type": "object",
            "properties": {"error": {
                "type": "object",
                "properties": {
                    "type": {
                        "description": "The first three are about an effect, the others about a request that is none.",
                        "enum": [
                            "refused", "failed", "in-doubt", "malformed", "unknown-kind", "not-at-this-door",
                            "identity-in-request", "no-such-route", "method-not-allowed", "too-large",
                            "length-required", "timeout", "internal",
                        ],
                    },
                    "kind": {"type": ["string", "null"]},
                    "resource": {"type": ["string", "null"]},
                    "handler": text("Who decided: a handler of the chain, `world`, or `api-door`."),
                    "reason": text("Why, in one sentence."),
                    "hint": text("What to change."),
                    "errno": text("The error number's name; EACCES for a refusal, EDQUOT for one by the quota."),
                },
                "required": ["type", "kind", "resource", "handler", "reason", "hint"],
            }},
            "required": ["error"],
        },
        "Self": {
            "type": "object",
            "properties": {
                "run": text("The run's id."),
                "room": {"type": ["string", "null"]},
                "policy": text("The policy's name."),
                "workspace": text("The workspace's path in the jail."),
                "chain": text("The handlers, outermost first."),
                "rules": {"type": "array", "items": {
                    "type": "object",
                    "properties": {
                        "verdict": {"enum": ["allow", "ask", "deny"]},
                        "kinds": {"type": "array", "items": {"type": "string"}},
                        "paths": {"type": "array", "items": {"type": "string"}},
                        "network": {"type": "array", "items": {"type": "string"}},
                    },
                }},
                "mounts": {"type": "array", "items": {
                    "type": "object",
                    "properties": {"path": {"type": "string"}, "access": {"type": "string"}},
                }},
                "limits": {"type": "object", "additionalProperties": number},
                "degraded": {"type": "array", "items": {"type": "string"}},
                "ask": text("How to get more."),
            },
        },
        "Budget": {
            "type": "object",
            "description": "By the limit's name, whose end is its unit. null is unlimited.",
            "additionalProperties": {
                "type": "object",
                "properties": {"limit": number, "used": {"type": "integer", "minimum": 0}, "left": number},
            },
        },
        "Opinion": {
            "type": "object",
            "properties": {
                "kind": {"type": "string"},
                "resource": {"type": "string"},
                "verdict": {"enum": ["allow", "ask", "deny"]},
                "handler": text("Who would decide."),
                "rule": text("The rule, as the policy writes it; empty where none matches."),
                "reason": text("Why, in one sentence."),
                "hint": text("What to change for it to pass."),
            },
        },
    });
    match schemas {
        Value::Object(schemas) => schemas,
        _ => Map::new(),
    }
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

fn query(name: &str, schema: Value, required: bool) -> Value {
    json!({"name": name, "in": "query", "required": required, "schema": schema})
}

fn file_path() -> Value {
    json!({
        "name": "path",
        "in": "path",
        "required": true,
        "schema": {"type": "string"},
        "description": "The path's bytes, percent-encoded; slashes may stand as they are. No backslash escapes.",
    })
}

fn path() -> Value {
    text(
        "A path, relative to the workspace or absolute. A backslash is written `\\\\`, a byte that is not UTF-8 `\\xNN`.",
    )
}

fn mode() -> Value {
    json!({"type": "string", "pattern": "^[0-7]{1,5}$", "description": "Permission bits in octal, at most 0777."})
}

fn expect() -> Value {
    text("What must be there: `absent`, `sha256:<hex>`, or `unchanged:<nanoseconds since the epoch>`.")
}

fn text(description: &str) -> Value {
    json!({"type": "string", "description": description})
}

fn integer(description: &str, minimum: u64, maximum: Option<u64>) -> Value {
    let mut schema = json!({"type": "integer", "minimum": minimum, "description": description});
    if let Some(maximum) = maximum {
        schema["maximum"] = maximum.into();
    }
    schema
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_and_every_kind_of_the_door_is_described() {
        let document = document();
        for route in ROUTES {
            let operation = &document["paths"][route.path][route.method.to_ascii_lowercase()];
            assert_eq!(operation["summary"], route.summary);
            assert!(operation["operationId"].is_string());
        }
        for row in VOCABULARY {
            let schema = &document["components"]["schemas"][schema_name(row)];
            assert_eq!(schema["properties"]["kind"]["const"].as_str(), row.at_api_door.then_some(row.name));
        }
    }

    #[test]
    fn every_reference_leads_somewhere() {
        fn walk(value: &Value, document: &Value) {
            match value {
                Value::Object(fields) => {
                    if let Some(Value::String(to)) = fields.get("$ref") {
                        let pointer = to.strip_prefix('#').expect("is local");
                        assert!(document.pointer(pointer).is_some(), "{to}");
                    }
                    fields.values().for_each(|value| walk(value, document));
                }
                Value::Array(values) => values.iter().for_each(|value| walk(value, document)),
                _ => {}
            }
        }
        walk(document(), document());
    }

    #[test]
    fn the_copy_for_readers_is_this_document() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");
        let expected = format!("{:#}\n", document());
        if std::env::var_os("TOLLGATE_UPDATE_DOCS").is_some() {
            std::fs::write(file, &expected).expect("the docs can be written");
        }
        let copy = std::fs::read_to_string(file).unwrap_or_default();
        assert!(copy == expected, "docs/openapi.json differs; run this test with TOLLGATE_UPDATE_DOCS=1");
    }
}
