//! What a request does, where a protocol above HTTP says so.
//!
//! A method alone cannot tell reading from writing: git fetches by POST, and GraphQL asks and changes by the same one.
//! So the door names the operation, and a policy can admit `git/fetch` and `graphql/query` alone. What cannot be read
//! has no operation, or the one that is called unknown; a rule that names operations matches neither.

use apollo_parser::{
    cst::{Definition, OperationType},
    Parser,
};
use serde::{
    de::{MapAccess, SeqAccess, Visitor},
    Deserialize, Deserializer,
};
use std::fmt;

/// The longest body that is read to find its operation, in bytes.
pub const MOST_READ: usize = 1024 * 1024;

/// How deep a GraphQL document may nest, and how many tokens it may have: more is not read.
const DEEPEST: usize = 64;
/// See [`DEEPEST`].
const MOST_TOKENS: usize = 50_000;

/// The operation of a request to this target, as far as the target says it: git's protocol over HTTP
/// (gitprotocol-http(5)).
pub fn of_target(method: &str, path: &str, query: Option<&str>) -> Option<&'static str> {
    let service = |name: &str| match name {
        "git-upload-pack" => Some("git/fetch"),
        "git-receive-pack" => Some("git/push"),
        _ => None,
    };
    // As a server reads it: an encoded letter is the letter.
    let path = percent_encoding::percent_decode_str(path).decode_utf8_lossy();
    if path.ends_with("/info/refs") {
        // Any of several: a server may take the last one or the first.
        let mut services = query?.split('&').filter_map(|part| service(unescaped(part).strip_prefix("service=")?));
        let first = services.next()?;
        return Some(services.find(|other| *other == "git/push").unwrap_or(first));
    }
    let (_, last) = path.rsplit_once('/')?;
    (method == "POST").then(|| service(last)).flatten()
}

/// Whether a body of this type may be a GraphQL request, so that it is worth reading.
pub fn may_be_graphql(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim();
    ["application/json", "application/graphql", "application/graphql+json"]
        .iter()
        .any(|one| kind.eq_ignore_ascii_case(one))
}

/// The operation of a request that may be GraphQL: the strongest of what its target and its content say, since servers
/// differ in which of them they take.
pub fn of_graphql(query: Option<&str>, content_type: &str, body: Option<&[u8]>) -> Option<&'static str> {
    let of_body = body.and_then(|body| of_body(content_type, body));
    let documents: Vec<String> = query
        .unwrap_or_default()
        .split('&')
        .filter_map(|part| part.split_once('='))
        .filter(|(name, _)| unescaped(name).eq_ignore_ascii_case("query"))
        .map(|(_, value)| unescaped(value))
        .collect();
    let in_target = |text: &String| match (of_document(text), of_body) {
        (None, Some(_)) => Some(UNKNOWN),
        // Many addresses that have nothing to do with GraphQL have a parameter of this name.
        (known, _) => known,
    };
    documents.iter().map(in_target).chain([of_body]).flatten().max_by_key(|one| strength(one))
}

fn unescaped(text: &str) -> String {
    let spaced = text.replace('+', " ");
    percent_encoding::percent_decode_str(&spaced).decode_utf8_lossy().into_owned()
}

/// The operation of a body: what a GraphQL document or a batch of them does at most. None for what is no GraphQL.
pub fn of_body(content_type: &str, body: &[u8]) -> Option<&'static str> {
    let kind = content_type.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/graphql") {
        return Some(std::str::from_utf8(body).ok().and_then(of_document).unwrap_or(UNKNOWN));
    }
    let Ok(content) = serde_json::from_slice::<Content>(body) else { return None };
    match &content {
        Content::One(request) => of_request(request),
        Content::Batch(requests) => {
            // A batch does what its strongest request does; one that is no GraphQL makes all of it unknown.
            let found: Vec<Option<&str>> = requests.iter().map(|one| of_request(one.as_ref()?)).collect();
            if found.iter().all(Option::is_none) {
                return None;
            }
            found.into_iter().map(|one| one.unwrap_or(UNKNOWN)).max_by_key(|one| strength(one))
        }
        Content::Other => None,
    }
}

const UNKNOWN: &str = "graphql/unknown";

/// A JSON object with every member in its place: of two with one name a server may take either, and some fold case.
type Members = Vec<(String, serde_json::Value)>;

/// A JSON text, as far as it may be GraphQL.
enum Content {
    One(Members),
    /// None for what is no object.
    Batch(Vec<Option<Members>>),
    Other,
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Content, D::Error> {
        struct Reader;

        impl<'de> Visitor<'de> for Reader {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON value")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Content, A::Error> {
                let mut members = Members::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Content::One(members))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Content, A::Error> {
                let mut batch = Vec::new();
                while let Some(one) = list.next_element()? {
                    batch.push(match one {
                        Content::One(members) => Some(members),
                        Content::Batch(_) | Content::Other => None,
                    });
                }
                Ok(Content::Batch(batch))
            }

            fn visit_bool<E>(self, _: bool) -> Result<Content, E> {
                Ok(Content::Other)
            }

            fn visit_i64<E>(self, _: i64) -> Result<Content, E> {
                Ok(Content::Other)
            }

            fn visit_u64<E>(self, _: u64) -> Result<Content, E> {
                Ok(Content::Other)
            }

            fn visit_f64<E>(self, _: f64) -> Result<Content, E> {
                Ok(Content::Other)
            }

            fn visit_str<E>(self, _: &str) -> Result<Content, E> {
                Ok(Content::Other)
            }

            fn visit_unit<E>(self) -> Result<Content, E> {
                Ok(Content::Other)
            }
        }

        from.deserialize_any(Reader)
    }
}

fn of_request(members: &Members) -> Option<&'static str> {
    let named = |wanted: &'static str| members.iter().filter(move |(name, _)| name.eq_ignore_ascii_case(wanted));
    let documents: Vec<&'static str> =
        named("query").filter_map(|(_, value)| Some(of_document(value.as_str()?).unwrap_or(UNKNOWN))).collect();
    match documents[..] {
        [] => {
            // A stored document, known by its hash or name: nobody here knows what it does.
            let stored = named("extensions").chain(named("operationName")).next().is_some();
            stored.then_some(UNKNOWN)
        }
        [one] if named("query").count() == 1 => Some(one),
        _ => Some(UNKNOWN),
    }
}

fn strength(operation: &str) -> usize {
    ["graphql/query", "graphql/subscription", "graphql/mutation", UNKNOWN]
        .iter()
        .position(|one| *one == operation)
        .unwrap_or(usize::MAX)
}

/// What a document does at most: all of its operations are looked at, whichever is chosen by name.
fn of_document(document: &str) -> Option<&'static str> {
    let tree = Parser::new(document).recursion_limit(DEEPEST).token_limit(MOST_TOKENS).parse();
    if tree.errors().len() > 0 {
        return None;
    }
    let mut found = None;
    for definition in tree.document().definitions() {
        let operation = match definition {
            Definition::FragmentDefinition(_) => continue,
            Definition::OperationDefinition(operation) => match operation.operation_type() {
                None => "graphql/query",
                Some(kind) => of_type(&kind)?,
            },
            // A schema is no request.
            _ => return None,
        };
        found = found.max_by_strength(operation);
    }
    found
}

fn of_type(kind: &OperationType) -> Option<&'static str> {
    match () {
        () if kind.mutation_token().is_some() => Some("graphql/mutation"),
        () if kind.subscription_token().is_some() => Some("graphql/subscription"),
        () if kind.query_token().is_some() => Some("graphql/query"),
        () => None,
    }
}

trait MaxByStrength {
    fn max_by_strength(self, other: &'static str) -> Self;
}

impl MaxByStrength for Option<&'static str> {
    fn max_by_strength(self, other: &'static str) -> Self {
        self.into_iter().chain([other]).max_by_key(|one| strength(one))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn git_fetches_and_pushes_are_told_apart() {
        assert_eq!(of_target("GET", "/r/info/refs", Some("service=git-upload-pack")), Some("git/fetch"));
        assert_eq!(of_target("GET", "/r/info/refs", Some("service=git-receive-pack")), Some("git/push"));
        assert_eq!(
            of_target("GET", "/r/info/refs", Some("service=git-upload-pack&service=git-receive-pack")),
            Some("git/push")
        );
        assert_eq!(of_target("POST", "/r/git-upload-pack", None), Some("git/fetch"));
        assert_eq!(of_target("POST", "/r/git-receive-pack", None), Some("git/push"));
        assert_eq!(of_target("POST", "/r/git-receive%2Dpack", None), Some("git/push"));
        assert_eq!(of_target("GET", "/r/info/%72efs", Some("%73ervice=git-receive%2dpack")), Some("git/push"));
        for (method, path, query) in [
            ("GET", "/r/git-upload-pack", None),
            ("POST", "/r/git-upload-pack/", None),
            ("GET", "/r/info/refs", None),
            ("POST", "/x", Some("service=git-upload-pack")),
        ] {
            assert_eq!(of_target(method, path, query), None, "{method} {path}");
        }
    }

    #[test]
    fn graphql_is_what_its_strongest_operation_is() {
        let json = |text: &str| of_body("application/json; charset=utf-8", text.as_bytes());
        assert_eq!(json(r#"{"query":"{ me { id } }"}"#), Some("graphql/query"));
        assert_eq!(json(r#"{"query":"query A { a } mutation B { b }","operationName":"A"}"#), Some("graphql/mutation"));
        assert_eq!(json(r#"{"query":"fragment F on U { a } query { ...F }"}"#), Some("graphql/query"));
        assert_eq!(json(r#"[{"query":"{a}"},{"query":"mutation {b}"}]"#), Some("graphql/mutation"));
        assert_eq!(json(r#"[{"query":"{a}"},{"x":1}]"#), Some("graphql/unknown"));
        assert_eq!(json(r#"{"query":"mutation {"}"#), Some("graphql/unknown"));
        assert_eq!(json(r#"{"operationName":"A","extensions":{"persistedQuery":{}}}"#), Some("graphql/unknown"));
        assert_eq!(json(r#"{"name":"x"}"#), None);
        assert_eq!(json("not json"), None);
        assert_eq!(of_body("application/graphql", b"subscription { a }"), Some("graphql/subscription"));
        assert_eq!(of_body("application/graphql", b"\xff"), Some("graphql/unknown"));
        // Of two members a server may take either, and some fold case.
        assert_eq!(json(r#"{"query":"mutation {b}","query":"{a}"}"#), Some("graphql/unknown"));
        assert_eq!(json(r#"{"query":"{a}","Query":"mutation {b}"}"#), Some("graphql/unknown"));
        assert_eq!(json(r#"{"QUERY":"mutation {b}"}"#), Some("graphql/mutation"));
        assert_eq!(json(r#"{"query":"{a}","query":null}"#), Some("graphql/unknown"));
        assert_eq!(json(r#"[[{"query":"mutation {b}"}],{"query":"{a}"}]"#), Some("graphql/unknown"));
        // "# mutation" in a comment or a string is none.
        assert_eq!(json(r#"{"query":"{ a(b: \"mutation\") }"}"#), Some("graphql/query"));
    }

    #[test]
    fn the_target_and_the_content_are_both_looked_at() {
        let json = "application/json";
        let query = Some(&br#"{"query":"{a}"}"#[..]);
        assert_eq!(of_graphql(Some("query=mutation%20%7Bb%7D"), json, query), Some("graphql/mutation"));
        assert_eq!(of_graphql(Some("%71uery=mutation+{b}"), json, query), Some("graphql/mutation"));
        assert_eq!(of_graphql(Some("query={a}&query=mutation{b}"), "", None), Some("graphql/mutation"));
        assert_eq!(of_graphql(Some("Query=mutation{b}"), json, query), Some("graphql/mutation"));
        assert_eq!(of_graphql(Some("query=%7B"), json, query), Some("graphql/unknown"));
        assert_eq!(of_graphql(Some("query={a}"), "", None), Some("graphql/query"));
        assert_eq!(of_graphql(Some("query=how+to+tie+a+knot"), "", None), None);
        assert_eq!(of_graphql(Some("q={a}"), "", None), None);
    }

    #[test]
    fn a_document_that_nests_deep_is_unknown_and_harms_nobody() {
        let deep = format!("{}{}", "{a".repeat(20_000), "}".repeat(20_000));
        let body = serde_json::json!({ "query": deep }).to_string();
        assert_eq!(of_body("application/json", body.as_bytes()), Some("graphql/unknown"));
    }

    proptest! {
        #[test]
        fn no_body_makes_it_panic(body in proptest::collection::vec(any::<u8>(), 0..200), text in ".{0,100}") {
            let _ = of_body("application/json", &body);
            let _ = of_body("application/graphql", text.as_bytes());
            let _ = of_target("POST", &text, Some(&text));
        }
    }
}
