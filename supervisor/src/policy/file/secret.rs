//! The tables of `[[secret]]`.

use super::{quoted, At, Reader, Value};
use crate::policy::{
    overrides::check_variable_name,
    secret::{Secret, SecretOrigin, SecretPlace, SecretRate, SecretSource},
};
use std::path::PathBuf;
use toml::de::DeTable;

pub(super) const SECRET_KEYS: &[&str] = &["name", "from", "to", "place", "method", "rate", "ask"];
pub(super) const SOURCE_KEYS: &[&str] = &["env", "file", "credential", "user", "password"];

const FORM: &str = "a table with name, from, to and place";
const SOURCE_FORM: &str = "{ env = \"NAME\" }, { file = \"/path\" }, { credential = \"NAME\" } or { user = \"NAME\", \
                           password = { … } }";
const TO_FORM: &str = "a list of origins such as [\"https://api.example.org\"]";
const PLACE_FORM: &str = "a list of places such as [\"header:Authorization\"]";

impl Reader<'_> {
    pub(super) fn secrets(&mut self, value: &Value<'_>) -> Vec<Secret> {
        let Some(items) = self.array(value, "secret", FORM) else { return Vec::new() };
        let mut secrets: Vec<Secret> = Vec::new();
        for item in items {
            let Some(table) = self.table(item, FORM) else { continue };
            let start = item.span().start;
            let Some(secret) = self.secret(table, start) else { continue };
            match secrets.iter().any(|known| known.name == secret.name) {
                true => {
                    self.fault(start, format!("the secret {} is there twice", quoted(&secret.name)), "take one out")
                }
                false => secrets.push(secret),
            }
        }
        secrets
    }

    fn secret(&mut self, table: &DeTable<'_>, start: usize) -> Option<Secret> {
        self.keys(table, "in a secret", SECRET_KEYS, &[]);
        let before = self.faults.len();
        for key in ["name", "from", "to", "place"] {
            if !table.contains_key(key) {
                self.fault(start, format!("a secret has no `{key}`"), format!("write {FORM}"));
            }
        }
        let name = self.string(table.get("name")?, "name", "the name of a variable")?;
        if let Err(message) = check_variable_name(&name.value) {
            self.fault(name.offset, format!("the secret {} {message}", quoted(&name.value)), "");
        }
        let from = self.source_of(table.get("from")?);
        let to = self.parsed(table, "to", TO_FORM, SecretOrigin::parse);
        let places = self.parsed(table, "place", PLACE_FORM, SecretPlace::parse);
        for (key, empty) in [("to", to.is_empty()), ("place", places.is_empty())] {
            if let Some(value) = table.get(key).filter(|_| empty && self.faults.len() == before) {
                self.fault(value.span().start, format!("`{key}` is empty, so the secret could not be used"), "");
            }
        }
        let methods = table.get("method").and_then(|value| self.strings(value, "method", "a list of methods"));
        let rate = table.get("rate").and_then(|value| self.string(value, "rate", "a rate such as \"60/min\""));
        let rate = rate.and_then(|text| self.good(&text, SecretRate::parse));
        let ask = match table.get("ask").map(|value| (value, value.get_ref().as_bool())) {
            None => false,
            Some((_, Some(ask))) => ask,
            Some((value, None)) => self.wrong_type(value, "ask", "true or false").unwrap_or_default(),
        };
        let methods = methods.unwrap_or_default().into_iter().map(|method| method.value).collect();
        (self.faults.len() == before).then_some(Secret {
            name: name.value,
            from: from?,
            to,
            places,
            methods,
            rate,
            ask,
        })
    }

    fn good<T>(&mut self, text: &At<String>, read: impl Fn(&str) -> Result<T, String>) -> Option<T> {
        match read(&text.value) {
            Ok(value) => Some(value),
            Err(message) => {
                self.fault(text.offset, format!("{} {message}", quoted(&text.value)), "");
                None
            }
        }
    }

    fn parsed<T>(
        &mut self,
        table: &DeTable<'_>,
        key: &str,
        form: &str,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Vec<T> {
        let texts = table.get(key).and_then(|value| self.strings(value, key, form)).unwrap_or_default();
        texts.iter().filter_map(|text| self.good(text, &read)).collect()
    }

    fn source_of(&mut self, value: &Value<'_>) -> Option<SecretSource> {
        let table = self.table(value, SOURCE_FORM)?;
        self.keys(table, "in a secret's source", SOURCE_KEYS, &[]);
        let start = value.span().start;
        let text = |reader: &mut Self, key: &str| {
            table
                .get(key)
                .and_then(|value| reader.string(value, key, SOURCE_FORM))
                .map(|text| (text.value, text.offset))
        };
        let found = [text(self, "env"), text(self, "file"), text(self, "credential"), text(self, "user")];
        let [env, file, credential, user] = found;
        match (env, file, credential, user, table.get("password")) {
            (Some((name, offset)), None, None, None, None) => match check_variable_name(&name) {
                Ok(()) => Some(SecretSource::Env(name)),
                Err(message) => {
                    self.fault(offset, format!("variable {} {message}", quoted(&name)), "");
                    None
                }
            },
            (None, Some((path, offset)), None, None, None) => {
                let path = PathBuf::from(path);
                if !path.is_absolute() {
                    self.fault(offset, format!("the file {} is not absolute", path.display()), "write its whole path");
                    return None;
                }
                Some(SecretSource::File(path))
            }
            (None, None, Some((name, offset)), None, None) => {
                if name.is_empty() || name.contains('/') || name.starts_with('.') {
                    self.fault(offset, format!("{} is no name of a credential", quoted(&name)), "");
                    return None;
                }
                Some(SecretSource::Credential(name))
            }
            (None, None, None, Some((user, offset)), Some(password)) => {
                if user.contains(':') {
                    // RFC 7617, section 2.
                    self.fault(offset, "a user of the Basic scheme has no `:`", "");
                    return None;
                }
                Some(SecretSource::Basic { user, password: Box::new(self.source_of(password)?) })
            }
            _ => {
                self.fault(start, "a secret comes from one source", format!("write {SOURCE_FORM}"));
                None
            }
        }
    }
}
