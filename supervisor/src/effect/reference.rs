//! The vocabulary for readers: as a schema and as a page of the reference. Both are made from [`VOCABULARY`].

use super::{Class, Declaration, Door, FaultKind, Idempotency, Size, StandIn, VOCABULARY};
use serde_json::{json, Value};
use std::fmt::Write as _;

/// The version of the vocabulary. It grows when a kind joins or a request gains a field; nothing is ever taken away
/// without another first number.
const VERSION: &str = "1.1";

/// Every class with what it means.
const CLASSES: [(Class, &str); 9] = [
    (Class::Read, "observes, and changes nothing an observer could see but a receipt"),
    (Class::Write, "changes the room or the host"),
    (Class::Network, "sends a packet out of the jail"),
    (Class::Egress, "hands data to a party outside"),
    (Class::Spend, "costs money or budget"),
    (Class::Process, "starts or steers a process"),
    (Class::Lifecycle, "creates or ends runs, rooms or agents"),
    (Class::Schedule, "causes a later effect"),
    (Class::Global, "touches state shared beyond the room"),
];

/// Every idempotency with what it means.
const IDEMPOTENCIES: [(Idempotency, &str); 3] = [
    (Idempotency::Idempotent, "twice leaves the world as once does"),
    (Idempotency::Compensable, "has a known inverse"),
    (Idempotency::Once, "never again without confirmation; its intent is on disk before it happens"),
];

/// Every stand-in with what it means.
const STAND_INS: [(StandIn, &str); 3] = [
    (StandIn::World, "the world itself, which touches nothing outside the run"),
    (StandIn::Done, "success, with the result that the request itself implies"),
    (StandIn::Nothing, "nothing can: the effect is refused"),
];

/// Every rule of size with what it means.
const SIZES: [(Size, &str); 2] = [
    (Size::Nothing, "nothing: it writes no bytes"),
    (Size::Content, "the length of the content that it writes or sends"),
];

/// Every kind of fault with what it means.
const FAULTS: [(FaultKind, &str); 6] = [
    (FaultKind::Error, "fails with an error number"),
    (FaultKind::Timeout, "gives nothing back until a time limit, then fails"),
    (FaultKind::RateLimit, "is told to come back later, with Retry-After"),
    (FaultKind::Truncated, "gives a shorter result, and says how long it is"),
    (FaultKind::Corrupted, "gives a result in which a byte is another"),
    (FaultKind::Cut, "gives a result that breaks off before its announced length"),
];

fn faults_of(row: &Declaration) -> Vec<Value> {
    let doors = |doors: &[Door]| doors.iter().map(|door| door.name()).collect::<Vec<_>>();
    row.faults
        .iter()
        .map(|shape| json!({ "kind": shape.kind, "doors": doors(shape.doors), "arrives": shape.arrives }))
        .collect()
}

/// The vocabulary as a JSON Schema, whose `$defs` hold the kinds, classes and idempotencies as closed lists and whose
/// `x-kinds` says for each kind what the table says.
pub fn schema() -> Value {
    let words = |pairs: Vec<(Value, &str)>| -> Vec<Value> {
        pairs.into_iter().map(|(word, means)| json!({ "const": word, "description": means })).collect()
    };
    let kinds = VOCABULARY.iter().map(|row| (json!(row.name), row.summary)).collect();
    let rows: Vec<Value> = VOCABULARY
        .iter()
        .map(|row| {
            json!({
                "kind": row.name,
                "classes": row.classes,
                "idempotency": row.idempotency,
                "resource": row.resource,
                "summary": row.summary,
                "api": row.at_api_door,
                "standIn": row.stand_in,
                "size": row.size,
                "faults": faults_of(row),
            })
        })
        .collect();
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Tollgate's effects",
        "version": VERSION,
        "$defs": {
            "kind": { "oneOf": words(kinds) },
            "class": { "oneOf": words(CLASSES.iter().map(|(class, means)| (json!(class), *means)).collect()) },
            "idempotency": {
                "oneOf": words(IDEMPOTENCIES.iter().map(|(word, means)| (json!(word), *means)).collect())
            },
        },
        "x-kinds": rows,
    })
}

/// The text of `docs/effects.md`.
pub fn reference_markdown() -> String {
    let mut page = String::from(
        "# Effects\n\n\
         Every effect is of one of these kinds. The list is closed: policies and clients refer to kinds, and cannot \
         add one. This page is made from the vocabulary in `supervisor/src/effect`; a test holds them together.\n\n\
         | kind | classes | repeated | resource | at the API door | |\n\
         |---|---|---|---|---|---|\n",
    );
    for row in VOCABULARY {
        let classes: Vec<String> = row.classes.iter().map(word).collect();
        let door = if row.at_api_door { "yes" } else { "no" };
        line(
            &mut page,
            format_args!(
                "| `{}` | {} | {} | {} | {door} | {} |",
                row.name,
                classes.join(", "),
                word(&row.idempotency),
                row.resource,
                row.summary
            ),
        );
    }
    page.push_str(
        "\n## Classes\n\nWhat an effect touches. A kind has at least one.\n\n| class | an effect of it |\n|---|---|\n",
    );
    for (class, means) in CLASSES {
        line(&mut page, format_args!("| {} | {means} |", word(&class)));
    }
    page.push_str("\n## Repeating\n\nWhether an effect may be done twice.\n\n| word | an effect of it |\n|---|---|\n");
    for (idempotency, means) in IDEMPOTENCIES {
        line(&mut page, format_args!("| {} | {means} |", word(&idempotency)));
    }
    page.push_str(
        "\n## Stand-ins, sizes and faults\n\n\
         What answers while nothing is to happen (a preflight), what a quota of bytes counts, and the faults that a \
         kind can show, with the doors by which each arrives and what the asker sees, the natural one first.\n\n\
         | kind | stand-in | counted | faults |\n|---|---|---|---|\n",
    );
    for row in VOCABULARY {
        let shapes = row.faults.iter().map(|shape| {
            let doors: Vec<&str> = shape.doors.iter().map(|door| door.name()).collect();
            format!("{} ({}): {}", shape.kind.name(), doors.join(", "), shape.arrives.join(", "))
        });
        let shapes: Vec<String> = shapes.collect();
        let shapes = if shapes.is_empty() { "none".to_owned() } else { shapes.join("; ") };
        line(&mut page, format_args!("| `{}` | {} | {} | {shapes} |", row.name, word(&row.stand_in), word(&row.size)));
    }
    page.push_str("\n| stand-in | |\n|---|---|\n");
    for (stand_in, means) in STAND_INS {
        line(&mut page, format_args!("| {} | {means} |", word(&stand_in)));
    }
    page.push_str("\n| counted | |\n|---|---|\n");
    for (size, means) in SIZES {
        line(&mut page, format_args!("| {} | {means} |", word(&size)));
    }
    page.push_str("\n| fault | an effect |\n|---|---|\n");
    for (fault, means) in FAULTS {
        line(&mut page, format_args!("| {} | {means} |", fault.name()));
    }
    page.push_str(
        "\n## Paths\n\n\
         A workspace path is relative to the workspace, without `.`, `..`, double slashes or a slash at the end; the \
         workspace itself is the empty path. Bytes that are not UTF-8 are written `\\xNN` in lower case, and a \
         backslash `\\\\`. So one path has one spelling.\n\n\
         ## Digests\n\n\
         `request_digest` is SHA-256 over `tollgate.effect.v1`, a zero byte, the kind, a zero byte, the resource, a \
         zero byte and the request. The last two are canonical JSON: UTF-8, keys sorted by their bytes, no white \
         space, integers only. Who asked, in which room and by which door is not part of it, so equal requests have \
         equal digests in any run on any machine.\n",
    );
    page
}

fn line(page: &mut String, text: std::fmt::Arguments<'_>) {
    writeln!(page, "{text}").expect("writing into a string does not fail");
}

fn word(value: &impl serde::Serialize) -> String {
    let value = serde_json::to_value(value).expect("a unit variant serialises");
    value.as_str().unwrap_or_default().to_owned()
}
