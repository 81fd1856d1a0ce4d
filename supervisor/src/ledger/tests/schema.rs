//! The published schema of an export, held to what is exported.

use super::{trust::hosted, *};
use serde_json::Value;

fn schema() -> Value {
    serde_json::from_str(include_str!("../../../../docs/export.schema.json")).unwrap()
}

/// What is wrong with a value, by the part of JSON Schema that our schema uses. A keyword that is none of them is a
/// failure of the test, so that nothing in the schema goes unchecked.
fn faults(root: &Value, schema: &Value, value: &Value, at: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (keyword, rule) in schema.as_object().expect("a schema is an object") {
        let wrong = match keyword.as_str() {
            "$schema" | "$id" | "title" | "description" | "$defs" => false,
            "$ref" => {
                let pointer = rule.as_str().unwrap().strip_prefix('#').unwrap();
                found.extend(faults(root, root.pointer(pointer).expect("leads somewhere"), value, at));
                false
            }
            "oneOf" => {
                let fits =
                    rule.as_array().unwrap().iter().filter(|one| faults(root, one, value, at).is_empty()).count();
                fits != 1
            }
            "const" => rule != value,
            "enum" => !rule.as_array().unwrap().contains(value),
            "type" => {
                let is = |name: &Value| match name.as_str().unwrap() {
                    "object" => value.is_object(),
                    "array" => value.is_array(),
                    "string" => value.is_string(),
                    "integer" => value.is_u64() || value.is_i64(),
                    "boolean" => value.is_boolean(),
                    "null" => value.is_null(),
                    other => panic!("type {other}"),
                };
                !rule.as_array().map_or_else(|| is(rule), |names| names.iter().any(is))
            }
            "minimum" => value.as_i64().is_some_and(|number| number < rule.as_i64().unwrap()),
            "pattern" => value.as_str().is_some_and(|text| !matches(rule.as_str().unwrap(), text)),
            "items" => {
                for item in value.as_array().into_iter().flatten() {
                    found.extend(faults(root, rule, item, at));
                }
                false
            }
            "required" => {
                let names = rule.as_array().unwrap();
                names.iter().any(|name| value.get(name.as_str().unwrap()).is_none())
            }
            "properties" => {
                for (name, rule) in rule.as_object().unwrap() {
                    if let Some(field) = value.get(name) {
                        found.extend(faults(root, rule, field, &format!("{at}/{name}")));
                    }
                }
                false
            }
            "additionalProperties" => {
                assert_eq!(rule, &Value::Bool(false));
                let known = schema["properties"].as_object().unwrap();
                value.as_object().is_some_and(|fields| fields.keys().any(|name| !known.contains_key(name)))
            }
            other => panic!("the schema uses `{other}`, which this test does not know"),
        };
        if wrong {
            found.push(format!("{at}: {keyword} {rule} of {value}"));
        }
    }
    found
}

/// The regular expressions of the schema: `^`, then classes or letters, each with an optional `+` or `{n}`, then `$`.
fn matches(pattern: &str, text: &str) -> bool {
    let mut pattern = pattern.strip_prefix('^').unwrap().strip_suffix('$').unwrap();
    let mut text = text;
    while !pattern.is_empty() {
        let (class, rest): (&str, &str) = match pattern.as_bytes()[0] {
            b'[' => pattern.split_at(pattern.find(']').unwrap() + 1),
            b'\\' => pattern.split_at(2),
            _ => pattern.split_at(1),
        };
        let (least, most, rest) = match rest.as_bytes().first() {
            Some(b'+') => (1, usize::MAX, &rest[1..]),
            Some(b'{') => {
                let (count, rest) = rest[1..].split_once('}').unwrap();
                let count = count.parse().unwrap();
                (count, count, rest)
            }
            _ => (1, 1, rest),
        };
        let inside = |letter: char| match class.as_bytes()[0] {
            b'[' => {
                let inner: Vec<char> = class[1..class.len() - 1].chars().collect();
                let ranges = inner.windows(3).any(|w| w[1] == '-' && (w[0]..=w[2]).contains(&letter));
                ranges || (inner.last() == Some(&'-') && letter == '-')
            }
            b'\\' => class.ends_with(letter),
            _ => class.starts_with(letter),
        };
        let taken = text.chars().take(most).take_while(|letter| inside(*letter)).count();
        if taken < least {
            return false;
        }
        text = &text[taken..];
        pattern = rest;
    }
    text.is_empty()
}

#[test]
fn every_line_of_an_export_is_what_the_schema_says() {
    let host = hosted();
    for effect in effect::tests::one_of_each() {
        let answer = Answer { digest: Some(Digest::of(b"x")), ..Answer::done(Value::Null, 1) };
        host.fixture.ledger.append(Draft::of(&host.fixture.run, &effect, &answer, Timestamp(0))).unwrap();
    }
    let (root, mut kinds) = (schema(), Vec::new());
    host.fixture.ledger.cut_some(&host.sealed[2]).unwrap();
    for run in host.sealed.iter().chain([&host.fixture.run]) {
        let mut out = Vec::new();
        host.fixture.ledger.export(run, &mut out).unwrap();
        for line in String::from_utf8(out).unwrap().lines() {
            let value: Value = serde_json::from_str(line).unwrap();
            let name = value["type"].as_str().unwrap().to_owned();
            assert_eq!(faults(&root, &root["$defs"][&name], &value, ""), Vec::<String>::new(), "{line}");
            assert_eq!(faults(&root, &root, &value, ""), Vec::<String>::new(), "{line}");
            kinds.push(name);
        }
    }
    kinds.sort_unstable();
    kinds.dedup();
    assert_eq!(kinds, ["header", "receipt", "seal", "unsealed"]);
}

#[test]
fn the_schema_refuses_what_is_no_line_of_an_export() {
    let host = hosted();
    let mut out = Vec::new();
    host.fixture.ledger.export(&host.sealed[0], &mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    let root = schema();
    for (line, from, to) in [
        (0, "tollgate.export.v1", "tollgate.export.v2"),
        (0, "\"receipts\":4", "\"receipts\":\"4\""),
        (1, "\"seq\":1", "\"seq\":0"),
        (1, "\"decision\":\"allowed\"", "\"decision\":\"fine\""),
        (1, "\"times\":1,", ""),
        (1, "{", "{\"more\":1,"),
        (1, "\"hash\":\"", "\"hash\":\"0"),
        (5, "\"type\":\"seal\"", "\"type\":\"end\""),
    ] {
        let line = text.lines().nth(line).unwrap();
        assert!(line.contains(from), "{from} in {line}");
        let value: Value = serde_json::from_str(&line.replacen(from, to, 1)).unwrap();
        assert!(!faults(&root, &root, &value, "").is_empty(), "{from} → {to}");
    }
}
