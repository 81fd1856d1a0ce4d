//! The keys of a rule and of `[network]` that are about the network.

use super::{quoted, At, Reader, Value, ANY};
use crate::{
    chain::admission::{is_network, HostPattern, Kinds, Listed, Target, UrlPattern},
    effect::{http::OPERATIONS, Kind},
    policy::{
        fault::{closest, suggest},
        network::{cidr, private_host, resolver, Network},
    },
};
use std::collections::BTreeMap;
use toml::de::{DeTable, DeValue};

pub(super) const NETWORK_KEYS: &[&str] = &["resolver", "host_ports", "private"];
/// The keys of a rule that make its target.
pub(super) const TARGET_KEYS: &[&str] = &["host", "port", "method", "url", "operation"];

const HOST_FORM: &str = "a list of hosts such as [\"api.example.org\", \"*.example.org\"], or \"any\"";
const PORT_FORM: &str = "a list of ports such as [443], or \"any\"";
const METHOD_FORM: &str = "a list of methods such as [\"GET\", \"HEAD\"], or \"any\"";
const URL_FORM: &str = "a list of URLs such as [\"https://api.example.org/v1/**\"], or \"any\"";
const OPERATION_FORM: &str = "a list of operations such as [\"git/fetch\", \"graphql/query\"], or \"any\"";

/// A target, and where its parts are written.
pub(super) struct Written {
    pub(super) target: Target,
    /// By key, where it stands.
    places: BTreeMap<&'static str, usize>,
    /// Where each URL stands.
    urls: Vec<usize>,
}

impl Reader<'_> {
    pub(super) fn network(&mut self, table: &DeTable<'_>) -> Network {
        self.keys(table, "in [network]", NETWORK_KEYS, &[]);
        let mut network = Network::default();
        if let Some(text) =
            table.get("resolver").and_then(|value| self.string(value, "resolver", "an address and port"))
        {
            match resolver(&text.value) {
                Ok(address) => network.resolver = Some(address),
                Err(message) => self.fault(text.offset, format!("`resolver` = {} {message}", quoted(&text.value)), ""),
            }
        }
        if let Some(value) = table.get("host_ports") {
            let ports = self.ports(value, "host_ports", "a list of ports such as [5432]");
            network.host_ports = ports.unwrap_or_default();
        }
        if let Some(hosts) = table.get("private").and_then(|value| self.table(value, "[network.private]")) {
            for (host, value) in hosts {
                let form = "a list of addresses or networks such as [\"10.0.0.0/8\"]";
                let name = match private_host(host.get_ref()) {
                    Ok(name) => name,
                    Err(message) => {
                        self.fault(host.span().start, format!("{} {message}", quoted(host.get_ref())), "");
                        continue;
                    }
                };
                let Some(texts) = self.strings(value, host.get_ref(), form) else { continue };
                if texts.is_empty() {
                    self.fault(
                        value.span().start,
                        format!("{} names no address", quoted(&name)),
                        format!("write {form}"),
                    );
                }
                for text in texts {
                    match cidr(&text.value) {
                        Ok(network_of) => network.private.entry(name.clone()).or_default().push(network_of),
                        Err(message) => self.fault(text.offset, format!("{} {message}", quoted(&text.value)), ""),
                    }
                }
            }
        }
        let mut joined = Network::default();
        joined.join(network);
        joined
    }

    /// The target of a rule; none where a part of it is wrong, which is said then.
    pub(super) fn target(&mut self, table: &DeTable<'_>) -> Option<Written> {
        let before = self.faults.len();
        let mut written = Written { target: Target::default(), places: BTreeMap::new(), urls: Vec::new() };
        for key in TARGET_KEYS {
            if let Some(value) = table.get(*key) {
                written.places.insert(key, value.span().start);
            }
        }
        let target = &mut written.target;
        if let Some(texts) = self.words_or_any(table, "host", HOST_FORM) {
            let mut listed = Listed::new(Vec::new());
            for text in texts {
                match HostPattern::parse(&text.value) {
                    Ok(pattern) => {
                        listed.lines.push(self.source.line(text.offset));
                        listed.patterns.push(pattern);
                    }
                    Err(error) => self.fault(text.offset, format!("{} is no host: {error}", quoted(&text.value)), ""),
                }
            }
            target.hosts = Some(listed);
        }
        if let Some(value) = table.get("port").filter(|value| !is_any(value)) {
            target.ports = self.ports(value, "port", PORT_FORM);
        }
        if let Some(texts) = self.words_or_any(table, "method", METHOD_FORM) {
            for text in &texts {
                self.check_method(text);
            }
            target.methods = Some(sorted(texts));
        }
        if let Some(texts) = self.words_or_any(table, "url", URL_FORM) {
            let mut listed = Listed::new(Vec::new());
            for text in texts {
                match UrlPattern::parse(&text.value) {
                    Ok(pattern) => {
                        listed.lines.push(self.source.line(text.offset));
                        listed.patterns.push(pattern);
                        written.urls.push(text.offset);
                    }
                    Err(error) => self.fault(text.offset, format!("{}: {error}", quoted(&text.value)), ""),
                }
            }
            target.urls = Some(listed);
        }
        if let Some(texts) = self.words_or_any(table, "operation", OPERATION_FORM) {
            for text in texts.iter().filter(|text| !OPERATIONS.contains(&text.value.as_str())) {
                let meant = suggest(closest(&text.value, OPERATIONS.iter().copied()));
                let message = format!("unknown operation {}{meant}", quoted(&text.value));
                self.fault(text.offset, message, format!("the operations are: {}", OPERATIONS.join(", ")));
            }
            target.operations = Some(sorted(texts));
        }
        (self.faults.len() == before).then_some(written)
    }

    /// A list of words; none where it is absent, stands for everything, or is wrong.
    fn words_or_any(&mut self, table: &DeTable<'_>, key: &'static str, form: &str) -> Option<Vec<At<String>>> {
        let value = table.get(key).filter(|value| !is_any(value))?;
        let texts = self.strings(value, key, form)?;
        if texts.is_empty() {
            self.fault(value.span().start, format!("`{key}` is empty, and matches nothing"), format!("write {form}"));
            return None;
        }
        if let Some(any) = texts.iter().find(|text| text.value == ANY) {
            self.fault(
                any.offset,
                format!("`any` beside others says nothing of `{key}`"),
                format!("write {key} = \"any\" alone"),
            );
            return None;
        }
        Some(texts)
    }

    fn ports(&mut self, value: &Value<'_>, key: &str, form: &str) -> Option<Vec<u16>> {
        let items = self.array(value, key, form)?;
        if items.is_empty() {
            self.fault(value.span().start, format!("`{key}` is empty, and matches nothing"), format!("write {form}"));
            return None;
        }
        let mut ports = Vec::new();
        for item in items {
            let DeValue::Integer(number) = item.get_ref() else {
                return self.wrong_type(item, key, form);
            };
            match number.to_string().parse::<u16>() {
                Ok(port) if port > 0 => ports.push(port),
                _ => {
                    let written = self.written(item);
                    self.fault(item.span().start, format!("`{written}` is no port"), "a port is from 1 to 65535");
                }
            }
        }
        ports.sort_unstable();
        ports.dedup();
        (!ports.is_empty()).then_some(ports)
    }

    fn check_method(&mut self, text: &At<String>) {
        // RFC 9110, section 5.6.2: a token.
        let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        let upper = text.value.to_ascii_uppercase();
        if text.value.is_empty() || !text.value.bytes().all(token) {
            self.fault(text.offset, format!("{} is no method", quoted(&text.value)), format!("write {METHOD_FORM}"));
        } else if text.value != upper && ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"].contains(&&*upper)
        {
            let message = format!("{} is another method than {upper}: methods have a case", quoted(&text.value));
            self.fault(text.offset, message, format!("write \"{upper}\""));
        }
    }
}

fn is_any(value: &Value<'_>) -> bool {
    match value.get_ref() {
        DeValue::String(text) => text == ANY,
        DeValue::Array(items) => {
            let mut items = items.iter();
            items.len() == 1 && items.next().is_some_and(|item| item.get_ref().as_str() == Some(ANY))
        }
        _ => false,
    }
}

fn sorted(texts: Vec<At<String>>) -> Vec<String> {
    let mut texts: Vec<String> = texts.into_iter().map(|text| text.value).collect();
    texts.sort();
    texts.dedup();
    texts
}

impl Written {
    /// The first key of the target that stands in the file.
    fn first(&self) -> Option<(&'static str, usize)> {
        self.places.iter().map(|(key, place)| (*key, *place)).min_by_key(|(_, place)| *place)
    }

    /// What is wrong with the target in a rule about these kinds: offset, message, help.
    pub(super) fn complaint(&self, kinds: &Kinds) -> Option<(usize, String, String)> {
        let (key, place) = self.first()?;
        let kinds = match kinds {
            Kinds::Any | Kinds::All => {
                let message = format!("`any` includes kinds that have no {key}");
                return Some((place, message, format!("take `{key}` out, or name the kinds")));
            }
            Kinds::Only(kinds) => kinds,
        };
        if let Some(kind) = kinds.iter().find(|kind| !is_network(**kind)) {
            let message = format!("{kind} has no {key}");
            return Some((place, message, format!("take `{key}` out, or write a rule of its own")));
        }
        for key in ["method", "url", "operation"] {
            let other = kinds.iter().find(|kind| **kind != Kind::HttpRequest);
            if let (Some(place), Some(kind)) = (self.places.get(key), other) {
                let message = format!("{kind} has no {key}: only an http/request shows one");
                return Some((*place, message, "write a rule of its own for http/request".to_owned()));
            }
        }
        if let (Some(place), [Kind::NetResolve]) = (self.places.get("port"), kinds.as_slice()) {
            return Some((*place, "net/resolve has no port".to_owned(), "take `port` out".to_owned()));
        }
        self.never_matches()
    }

    /// A URL that the rule's own hosts or ports exclude.
    fn never_matches(&self) -> Option<(usize, String, String)> {
        let urls = self.target.urls.as_ref()?;
        for (pattern, place) in urls.patterns.iter().zip(&self.urls) {
            if let Some(hosts) = &self.target.hosts {
                if !hosts.patterns.iter().any(|host| pattern.overlaps(host)) {
                    let message =
                        format!("{} can never match: no host of the rule is its host", quoted(pattern.text()));
                    return Some((
                        *place,
                        message,
                        "a rule with `url` needs no `host`; take one of them out".to_owned(),
                    ));
                }
            }
            if let Some(ports) = &self.target.ports {
                if !pattern.has_port_among(ports) {
                    let message =
                        format!("{} can never match: no port of the rule is its port", quoted(pattern.text()));
                    return Some((*place, message, "write the port in the URL, and take `port` out".to_owned()));
                }
            }
        }
        None
    }
}
