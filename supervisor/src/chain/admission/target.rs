//! What of the network a rule is about: hosts, ports, methods, URLs and operations.

use super::{
    hosts::{Host, HostPattern},
    urls::UrlPattern,
    Place, Verdict,
};
use crate::effect::{http, net, Effect, Request};

/// What of the network a rule is about. Each part that is absent is about everything; an effect matches when every part
/// does, and a part when one of its list does. A target with any part matches no effect but those of the network.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// Hosts.
    pub hosts: Option<Listed<HostPattern>>,
    /// Ports.
    pub ports: Option<Vec<u16>>,
    /// Methods, of `http/request` alone.
    pub methods: Option<Vec<String>>,
    /// URLs, of `http/request` alone.
    pub urls: Option<Listed<UrlPattern>>,
    /// Operations, of `http/request` alone.
    pub operations: Option<Vec<String>>,
}

/// A list of patterns, and the line on which each is written; no lines where they are from no file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Listed<T> {
    /// The patterns.
    pub patterns: Vec<T>,
    /// Their lines.
    pub lines: Vec<usize>,
}

impl<T> Listed<T> {
    /// Patterns that are from no file.
    pub fn new(patterns: Vec<T>) -> Listed<T> {
        Listed { patterns, lines: Vec::new() }
    }

    fn position(&self, matches: impl Fn(&T) -> bool) -> Option<usize> {
        self.patterns.iter().position(matches)
    }
}

/// What an effect of the network is about, its host in its one form.
pub(super) struct Object<'a> {
    host: Host,
    request: Asked<'a>,
}

enum Asked<'a> {
    Connect { port: u16 },
    Resolve,
    Http(&'a http::Request),
}

impl<'a> Object<'a> {
    /// None for what is no effect of the network.
    ///
    /// # Errors
    /// The reason for which no rule can ever admit it.
    pub(super) fn of(effect: &'a Effect) -> Result<Option<Object<'a>>, &'static str> {
        let (host, request) = match &effect.request {
            Request::Http(request) => (&request.host, Asked::Http(request)),
            Request::Net(net::Request::Connect { host, port, .. } | net::Request::Accept { host, port, .. }) => {
                (host, Asked::Connect { port: *port })
            }
            Request::Net(net::Request::Resolve { name, .. }) => (name, Asked::Resolve),
            Request::Fs(_) | Request::Run(_) | Request::Jail(_) | Request::Api(_) | Request::Program(_) => {
                return Ok(None)
            }
        };
        match Host::parse(host) {
            Ok(host) => Ok(Some(Object { host, request })),
            Err(_said_once) => Err(NO_HOST),
        }
    }
}

const NO_HOST: &str =
    "its host is neither a name nor an address in its usual form (`127.0.0.1`, `::1`), so no rule can \
                       tell what it is";

impl Target {
    /// Whether it is about everything, also outside the network.
    pub fn is_any(&self) -> bool {
        *self == Target::default()
    }

    /// Its parts as they would be written: key and words. Absent parts are left out.
    pub fn words(&self) -> Vec<(&'static str, Vec<String>)> {
        let Target { hosts, ports, methods, urls, operations } = self;
        fn shown<T>(list: &[T], show: impl Fn(&T) -> String) -> Vec<String> {
            list.iter().map(show).collect()
        }
        [
            ("host", hosts.as_ref().map(|hosts| shown(&hosts.patterns, HostPattern::to_string))),
            ("port", ports.as_ref().map(|ports| shown(ports, u16::to_string))),
            ("method", methods.clone()),
            ("url", urls.as_ref().map(|urls| shown(&urls.patterns, |url| url.text().to_owned()))),
            ("operation", operations.clone()),
        ]
        .into_iter()
        .filter_map(|(key, words)| Some((key, words?)))
        .collect()
    }

    /// Which part matched, if all do.
    pub(super) fn matches(&self, object: &Object<'_>, verdict: Verdict) -> Option<Place> {
        let by_host = match &self.hosts {
            None => None,
            Some(hosts) => Some(Place::Host(hosts.position(|pattern| pattern.matches(&object.host))?)),
        };
        let by_url = match &object.request {
            // A name is asked for before anybody knows what for: whether any use of it could be admitted decides.
            Asked::Resolve => match &self.urls {
                None => None,
                Some(urls) => Some(Place::Url(urls.position(|pattern| pattern.is_about(&object.host))?)),
            },
            Asked::Connect { port } => {
                let http_only = self.methods.is_some() || self.urls.is_some() || self.operations.is_some();
                if http_only || !includes(&self.ports, port) {
                    return None;
                }
                None
            }
            Asked::Http(request) => {
                let restricts = verdict != Verdict::Allow;
                if !includes(&self.ports, &request.port)
                    || !self.has_method(&request.method, restricts)
                    || !self.has_operation(request.operation.as_deref(), restricts)
                {
                    return None;
                }
                let matches = |pattern: &UrlPattern| match restricts {
                    true => pattern.restricts(&object.host, request),
                    false => pattern.admits(&object.host, request),
                };
                match &self.urls {
                    None => None,
                    Some(urls) => Some(Place::Url(urls.position(matches)?)),
                }
            }
        };
        Some(by_url.or(by_host).unwrap_or(Place::Whole))
    }

    /// Methods are case-sensitive (RFC 9110, section 9.1), and some servers take them otherwise.
    fn has_method(&self, method: &str, restricts: bool) -> bool {
        let Some(methods) = &self.methods else { return true };
        methods.iter().any(|known| match restricts {
            true => known.eq_ignore_ascii_case(method),
            false => known == method,
        })
    }

    /// What the door could not tell apart is restricted by whatever restricts one of its kind.
    fn has_operation(&self, operation: Option<&str>, restricts: bool) -> bool {
        let Some(operations) = &self.operations else { return true };
        let Some(operation) = operation else { return false };
        let family = operation.strip_suffix("unknown").filter(|_| restricts);
        operations.iter().any(|known| known == operation || family.is_some_and(|family| known.starts_with(family)))
    }
}

fn includes<T: PartialEq>(list: &Option<Vec<T>>, item: &T) -> bool {
    list.as_ref().is_none_or(|list| list.contains(item))
}
