//! Secrets: may this request carry what it carries?
//!
//! An effect names the secrets whose placeholders its request holds, and the places that they stand in. The values are
//! nowhere here. A request that would carry one to another origin, in another place or by another method than it is
//! bound to is refused whole: what is stripped and sent on would be a request that nobody made.

use super::{admission::Origin, Answer, BoxFuture, Handler, Next, Question};
use crate::{
    effect::{http, Effect, Request},
    policy::secret::{Secret, SecretRate},
};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, PoisonError},
    time::Instant,
};

const NAME: &str = "secrets";

/// The handler, for one run.
pub struct Secrets {
    secrets: Vec<Secret>,
    used: Mutex<HashMap<String, VecDeque<Instant>>>,
}

impl Secrets {
    /// By what the run's policy says.
    pub fn new(secrets: Vec<Secret>) -> Secrets {
        Secrets { secrets, used: Mutex::default() }
    }

    /// The secret that the effect must not carry as it does, with why; or the one that a person is asked about.
    fn judge(&self, request: &http::Request) -> Result<Option<&Secret>, Box<Answer>> {
        let mut asked = None;
        for used in &request.secrets {
            let refused = |reason: String, hint: String| {
                Err(Box::new(Answer::refused(NAME, format!("http/request {}: {reason}", request.url()), hint)))
            };
            let Some(secret) = self.secrets.iter().find(|secret| secret.name == used.name) else {
                return refused(format!("the secret {} is not this run's", used.name), String::new());
            };
            let goes = |to: &crate::policy::secret::SecretOrigin| {
                to.scheme == request.scheme && to.host == request.host && to.port == request.port
            };
            if !secret.to.iter().any(goes) {
                let to: Vec<String> = secret.to.iter().map(ToString::to_string).collect();
                return refused(
                    format!("the secret {} is bound to {}", secret.name, to.join(", ")),
                    format!("leave it out, or bind it in the policy too: to = [\"{}\"]", request.origin()),
                );
            }
            if !secret.places.iter().any(|place| place.to_string() == used.place) {
                let places: Vec<String> = secret.places.iter().map(ToString::to_string).collect();
                return refused(
                    format!(
                        "the secret {} stands in {}, and is bound to {}",
                        secret.name,
                        used.place,
                        places.join(", ")
                    ),
                    format!("send it there, or bind it in the policy too: place = [\"{}\"]", used.place),
                );
            }
            if !secret.methods.is_empty() && !secret.methods.contains(&request.method) {
                return refused(
                    format!(
                        "the secret {} is bound to {}, not {}",
                        secret.name,
                        secret.methods.join(", "),
                        request.method
                    ),
                    format!("add to the policy: method = [\"{}\"]", request.method),
                );
            }
            if secret.rate.is_some_and(|rate| !self.is_within(&secret.name, rate)) {
                return refused(
                    format!("the secret {} was used as often as its rate allows", secret.name),
                    "wait, or raise `rate` in the policy".to_owned(),
                );
            }
            if secret.ask {
                asked = asked.or(Some(secret));
            }
        }
        Ok(asked)
    }

    fn is_within(&self, name: &str, rate: SecretRate) -> bool {
        let now = Instant::now();
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let times = used.entry(name.to_owned()).or_default();
        while times.front().is_some_and(|time| now.duration_since(*time) >= rate.within) {
            times.pop_front();
        }
        let within = times.len() < rate.most as usize;
        if within {
            times.push_back(now);
        }
        within
    }
}

impl Handler for Secrets {
    fn name(&self) -> &'static str {
        NAME
    }

    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
        let Request::Http(request) = &effect.request else { return next.run(effect) };
        match self.judge(request) {
            Ok(None) => next.run(effect),
            Ok(Some(secret)) => next
                .asking(Question {
                    origin: Origin {
                        file: "[[secret]]".to_owned(),
                        line: 0,
                        text: format!("ask about each request with {}", secret.name),
                    },
                })
                .run(effect),
            Err(refusal) => Box::pin(std::future::ready(*refusal)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::testing::wait,
        effect::{http::SecretUse, tests::sample, Kind},
        policy::secret::{SecretOrigin, SecretPlace, SecretSource},
    };
    use std::time::Duration;

    fn secret() -> Secret {
        Secret {
            name: "TOK".into(),
            from: SecretSource::Env("TOK".into()),
            to: vec![SecretOrigin::parse("https://api.test").unwrap()],
            places: vec![SecretPlace::parse("header:authorization").unwrap()],
            methods: vec!["GET".into()],
            rate: None,
            ask: false,
        }
    }

    fn request(url: (http::Scheme, &str, u16), place: &str, method: &str) -> http::Request {
        let Request::Http(request) = sample(Kind::HttpRequest).request else {
            unreachable!("a request's sample is one")
        };
        http::Request {
            scheme: url.0,
            host: url.1.to_owned(),
            port: url.2,
            method: method.to_owned(),
            secrets: vec![SecretUse { name: "TOK".to_owned(), place: place.to_owned() }],
            ..request
        }
    }

    const API: (http::Scheme, &str, u16) = (http::Scheme::Https, "api.test", 443);

    #[test]
    fn a_secret_goes_where_it_is_bound_to_and_nowhere_else() {
        let handler = Secrets::new(vec![secret()]);
        assert!(handler.judge(&request(API, "header:authorization", "GET")).is_ok());
        for (url, place, method) in [
            ((http::Scheme::Http, "api.test", 443), "header:authorization", "GET"),
            ((http::Scheme::Https, "other.test", 443), "header:authorization", "GET"),
            ((http::Scheme::Https, "api.test", 8443), "header:authorization", "GET"),
            ((http::Scheme::Https, "127.0.0.1", 443), "header:authorization", "GET"),
            (API, "header:x-token", "GET"),
            (API, "query:key", "GET"),
            (API, "body", "GET"),
            (API, "path", "GET"),
            (API, "header:authorization", "POST"),
        ] {
            let refusal = handler.judge(&request(url, place, method)).unwrap_err();
            assert_eq!(refusal.decided_by, "secrets");
            assert!(refusal.reason.contains("TOK"), "{}", refusal.reason);
        }
    }

    #[test]
    fn a_rate_is_kept() {
        let rate = SecretRate { most: 2, within: Duration::from_secs(3600) };
        let handler = Secrets::new(vec![Secret { rate: Some(rate), ..secret() }]);
        let fits = || handler.judge(&request(API, "header:authorization", "GET")).is_ok();
        assert_eq!([fits(), fits(), fits()], [true, true, false]);
    }

    #[test]
    fn a_request_that_a_person_must_agree_to_does_not_reach_the_world_unasked() {
        use crate::chain::{testing::FakeWorld, Chain};
        use std::sync::Arc;
        let mut effect = sample(Kind::HttpRequest);
        let asked = request(API, "header:authorization", "GET");
        effect.resource = asked.resource();
        effect.request = Request::Http(asked);
        let world = FakeWorld::default();
        let chain = Chain::new(vec![Arc::new(Secrets::new(vec![Secret { ask: true, ..secret() }]))]);
        assert!(!wait(chain.perform(&effect, &world)).is_success());
        assert!(world.done.lock().unwrap().is_empty());
    }
}
