//! `tollgate` inside the jail: the run's API socket from the command line.
//!
//! stdout is data, stderr is talk. The exit status is 0 for done, 1 for failed, 2 for a wrong use and 77 for refused.

mod http;

use serde_json::{Map, Value};
use std::{
    ffi::{OsStr, OsString},
    io::{self, Read, Write},
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Where the socket is bound in every jail, unless `$TOLLGATE_SOCKET` says otherwise.
const SOCKET: &str = "/run/tollgate/broker.sock";

/// The most that one request reads, in bytes; longer files are read in pieces.
const PIECE: u64 = 8 * 1024 * 1024;

/// The longest content that one request writes, in bytes.
const MAX_FILE: u64 = 64 * 1024 * 1024;

const USAGE: &str = "\
usage: tollgate COMMAND

  read PATH [--offset N] [--limit N]           print a file
  ls [PATH] [--json]                           list a directory
  write PATH [--mode M] [--expect E] [FILE]    write a file from FILE, or from stdin
  rm PATH [--expect E]                         delete a file, or a directory with all below it
  mv PATH TO                                   move
  effect KIND [NAME=VALUE...]                  ask for any effect; print the answer as JSON
  why KIND [PATH|METHOD URL|HOST:PORT] [NAME=VALUE...] [-- COMMAND]
                                              whether an effect would pass, and which rule says so
  self [--json]                                what is allowed, mounted and limited, and how to ask for more
  budget [--json]                              what is used and left

E is `absent`, `sha256:HEX` or `unchanged:NANOSECONDS`; M is octal.
Exit status: 0 done, 1 failed, 2 wrong use, 77 refused.
";

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// It was done, or told.
    Done = 0,
    /// It was allowed and failed, or nobody could be asked.
    Failed = 1,
    /// The command line is wrong.
    Usage = 2,
    /// A handler said no (`EX_NOPERM`, sysexits.h).
    Refused = 77,
}

/// Runs the client with the arguments after its name, on the process's own streams.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let socket = std::env::var_os("TOLLGATE_SOCKET").filter(|path| !path.is_empty());
    let socket = socket.map_or_else(|| PathBuf::from(SOCKET), PathBuf::from);
    let args: Vec<OsString> = args.into_iter().collect();
    let status = run(&args, &socket, &mut io::stdin().lock(), &mut io::stdout().lock(), &mut io::stderr().lock());
    ExitCode::from(status as u8)
}

/// Runs the client on these streams.
pub fn run(
    args: &[OsString],
    socket: &Path,
    input: &mut dyn Read,
    out: &mut dyn Write,
    talk: &mut dyn Write,
) -> Status {
    let mut client = Client { socket, out };
    let ended = client.command(args, input).and_then(|()| client.out.flush().map_err(Stop::Output));
    let (status, said) = match ended {
        Ok(()) => return Status::Done,
        // Whoever read our output has enough of it.
        Err(Stop::Output(cause)) if cause.kind() == io::ErrorKind::BrokenPipe => return Status::Done,
        Err(Stop::Output(cause)) => (Status::Failed, format!("tollgate: cannot write the output: {cause}\n")),
        Err(Stop::Usage(what)) => (Status::Usage, format!("tollgate: {what}\n{USAGE}")),
        Err(Stop::Failed(what)) => (Status::Failed, format!("tollgate: {what}\n")),
        Err(Stop::Told { status, said }) => (status, said),
    };
    // With stderr closed there is nobody to tell, and the status says it too.
    let _ = talk.write_all(said.as_bytes());
    status
}

/// Why a command stops.
enum Stop {
    Usage(String),
    Failed(String),
    Output(io::Error),
    /// The supervisor said so.
    Told {
        status: Status,
        said: String,
    },
}

struct Client<'a> {
    socket: &'a Path,
    out: &'a mut dyn Write,
}

impl Client<'_> {
    fn command(&mut self, args: &[OsString], input: &mut dyn Read) -> Result<(), Stop> {
        let (name, rest) = args.split_first().ok_or_else(|| Stop::Usage("say what to do".to_owned()))?;
        match name.to_str().unwrap_or_default() {
            "read" => self.read(Arguments::parse(rest, &["offset", "limit"], &[])?),
            "ls" => self.list(Arguments::parse(rest, &[], &["json"])?),
            "write" => self.write(Arguments::parse(rest, &["mode", "expect"], &[])?, input),
            "rm" => {
                let arguments = Arguments::parse(rest, &["expect"], &[])?;
                let [path] = arguments.words()?;
                let mut fields = Map::from_iter([("path".to_owned(), escape(path).into())]);
                if let Some(expect) = arguments.option("expect") {
                    fields.insert("expect".to_owned(), text(expect)?.into());
                }
                self.effect("fs/delete", fields).map(drop)
            }
            "mv" => {
                let [path, to] = Arguments::parse(rest, &[], &[])?.words()?;
                let fields = [("path".to_owned(), escape(path).into()), ("to".to_owned(), escape(to).into())];
                self.effect("fs/move", Map::from_iter(fields)).map(drop)
            }
            "effect" => {
                let (kind, pairs) = rest.split_first().ok_or_else(|| Stop::Usage("name a kind".to_owned()))?;
                let told = self.effect(text(kind)?, fields(pairs)?)?;
                self.print(&told)
            }
            "why" => self.why(rest),
            "self" => {
                let arguments = Arguments::parse(rest, &[], &["json"])?;
                let [] = arguments.words()?;
                let told = self.ask_json("GET", "/v1/self", b"")?;
                if arguments.json {
                    return self.print(&told);
                }
                self.say(&describe_self(&told))
            }
            "budget" => {
                let arguments = Arguments::parse(rest, &[], &["json"])?;
                let [] = arguments.words()?;
                let told = self.ask_json("GET", "/v1/budget", b"")?;
                if arguments.json {
                    return self.print(&told);
                }
                self.say(&describe_budget(&told))
            }
            "help" | "--help" | "-h" => self.say(USAGE),
            "version" | "--version" | "-V" => self.say(concat!("tollgate-shim ", env!("CARGO_PKG_VERSION"), "\n")),
            other => Err(Stop::Usage(format!("there is no command {other:?}"))),
        }
    }

    fn read(&mut self, arguments: Arguments<'_>) -> Result<(), Stop> {
        let [path] = arguments.words()?;
        let mut offset = arguments.number("offset")?.unwrap_or(0);
        let mut left = arguments.number("limit")?.unwrap_or(u64::MAX);
        loop {
            let wanted = left.min(PIECE);
            let target = format!("/v1/files/{}?offset={offset}&limit={wanted}", http::percent_encode(path.as_bytes()));
            let piece = self.ask("GET", &target, b"")?;
            self.out.write_all(&piece).map_err(Stop::Output)?;
            let length = piece.len() as u64;
            offset = offset.saturating_add(length);
            left = left.saturating_sub(length);
            if length < wanted || left == 0 {
                return Ok(());
            }
        }
    }

    fn list(&mut self, arguments: Arguments<'_>) -> Result<(), Stop> {
        let path = match arguments.words.as_slice() {
            [] => OsStr::new(""),
            [path] => path,
            _ => return Err(Stop::Usage("list one directory at a time".to_owned())),
        };
        let told = self.effect("fs/list", Map::from_iter([("path".to_owned(), escape(path).into())]))?;
        if arguments.json {
            return self.print(&told["value"]);
        }
        let entries = told["value"]["entries"].as_array().ok_or_else(|| odd("a list without entries"))?;
        let names = entries.iter().map(|entry| entry["name"].as_str().or(entry.as_str()).unwrap_or("?"));
        let lines: String = names.map(|name| format!("{}\n", printable(name))).collect();
        self.say(&lines)
    }

    fn write(&mut self, arguments: Arguments<'_>, input: &mut dyn Read) -> Result<(), Stop> {
        let (path, from) = match arguments.words.as_slice() {
            [path] => (*path, None),
            [path, from] => (*path, Some(*from).filter(|from| *from != "-")),
            _ => return Err(Stop::Usage("`write` takes a path, and a file to write from".to_owned())),
        };
        let mut content = Vec::new();
        let read = match from {
            Some(from) => std::fs::File::open(from).and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut content)),
            None => input.take(MAX_FILE + 1).read_to_end(&mut content),
        };
        read.map_err(|cause| {
            let from = from.map_or("stdin".into(), OsStr::to_string_lossy);
            Stop::Failed(format!("cannot read {}: {cause}", printable(&from)))
        })?;
        if content.len() as u64 > MAX_FILE {
            let hint = "longer files are written in the workspace itself";
            return Err(Stop::Failed(format!("the content is longer than {MAX_FILE} bytes; {hint}")));
        }
        let mut target = format!("/v1/files/{}", http::percent_encode(path.as_bytes()));
        let mut separator = '?';
        for name in ["mode", "expect"] {
            if let Some(value) = arguments.option(name) {
                target.push_str(&format!("{separator}{name}={}", http::percent_encode(value.as_bytes())));
                separator = '&';
            }
        }
        self.ask("PUT", &target, &content).map(drop)
    }

    fn why(&mut self, args: &[OsString]) -> Result<(), Stop> {
        let (args, command) = match args.iter().position(|arg| arg == "--") {
            Some(at) => (&args[..at], &args[at + 1..]),
            None => (args, &args[args.len()..]),
        };
        let arguments = Arguments::parse(args, &[], &["json"])?;
        let (kind, rest) = arguments.words.split_first().ok_or_else(|| Stop::Usage("name a kind".to_owned()))?;
        let mut target = format!("/v1/why?kind={}", http::percent_encode(kind.as_bytes()));
        for (at, word) in rest.iter().enumerate() {
            let bytes = word.as_bytes();
            let pair =
                bytes.iter().position(|byte| *byte == b'=').map(|equals| (&bytes[..equals], &bytes[equals + 1..]));
            let (name, value) = match pair {
                Some((name, value)) if !name.is_empty() && name.iter().all(u8::is_ascii_lowercase) => {
                    (String::from_utf8_lossy(name).into_owned(), value)
                }
                _ if *kind == OsStr::new("http/request") => match bytes.windows(3).any(|part| part == b"://") {
                    true => ("url".to_owned(), bytes),
                    false => ("method".to_owned(), bytes),
                },
                _ if at == 0 && *kind == OsStr::new("net/connect") => ("to".to_owned(), bytes),
                _ if at == 0 && *kind == OsStr::new("net/resolve") => ("name".to_owned(), bytes),
                _ if at == 0 => ("path".to_owned(), bytes),
                _ => return Err(Stop::Usage(format!("{word:?} is not NAME=VALUE"))),
            };
            let value = match name.as_str() {
                "path" | "to" => escape(OsStr::from_bytes(value)).into_bytes(),
                _ => value.to_owned(),
            };
            target.push_str(&format!("&{name}={}", http::percent_encode(&value)));
        }
        for word in command {
            target.push_str(&format!("&command={}", http::percent_encode(word.as_bytes())));
        }
        let told = self.ask_json("GET", &target, b"")?;
        match arguments.json {
            true => self.print(&told)?,
            false => self.say(&describe_opinion(&told))?,
        }
        match told["verdict"].as_str() {
            Some("allow") => Ok(()),
            _ => Err(Stop::Told { status: Status::Refused, said: String::new() }),
        }
    }

    fn effect(&mut self, kind: &str, mut fields: Map<String, Value>) -> Result<Value, Stop> {
        fields.insert("kind".to_owned(), kind.into());
        self.ask_json("POST", "/v1/effects", Value::Object(fields).to_string().as_bytes())
    }

    fn ask_json(&mut self, method: &str, target: &str, body: &[u8]) -> Result<Value, Stop> {
        let told = self.ask(method, target, body)?;
        serde_json::from_slice(&told).map_err(|cause| odd(&cause.to_string()))
    }

    fn ask(&mut self, method: &str, target: &str, body: &[u8]) -> Result<Vec<u8>, Stop> {
        let answer = http::ask(self.socket, method, target, body).map_err(|cause| {
            Stop::Failed(format!("cannot ask the supervisor at {}: {cause}", self.socket.display()))
        })?;
        match answer.status {
            200 => Ok(answer.body),
            status => Err(told(status, &answer.body)),
        }
    }

    fn print(&mut self, value: &Value) -> Result<(), Stop> {
        self.say(&format!("{value}\n"))
    }

    fn say(&mut self, text: &str) -> Result<(), Stop> {
        self.out.write_all(text.as_bytes()).map_err(Stop::Output)
    }
}

/// What the supervisor said instead of doing it.
fn told(status: u16, body: &[u8]) -> Stop {
    let Ok(body) = serde_json::from_slice::<Value>(body) else {
        return odd(&format!("status {status} without a reason"));
    };
    let error = &body["error"];
    let field = |name: &str| printable(error[name].as_str().unwrap_or_default());
    let of = match (field("kind").as_str(), field("resource").as_str()) {
        ("", _) => String::new(),
        (kind, "") => format!("{kind}: "),
        (kind, resource) => format!("{kind} {resource}: "),
    };
    let hint = match field("hint").as_str() {
        "" => String::new(),
        hint => format!("hint: {hint}\n"),
    };
    let said = format!("tollgate: {}: {of}{} (by {})\n{hint}", field("type"), field("reason"), field("handler"));
    let status = match error["type"].as_str() {
        Some("refused") => Status::Refused,
        Some("malformed" | "unknown-kind" | "not-at-this-door" | "identity-in-request") => Status::Usage,
        _ => Status::Failed,
    };
    Stop::Told { status, said }
}

fn odd(what: &str) -> Stop {
    Stop::Failed(format!("the supervisor's answer makes no sense: {what}"))
}

/// Arguments of a command: words, and options with and without a value.
struct Arguments<'a> {
    words: Vec<&'a OsStr>,
    options: Vec<(&'a str, &'a OsStr)>,
    json: bool,
}

impl<'a> Arguments<'a> {
    fn parse(args: &'a [OsString], valued: &[&'a str], flags: &[&str]) -> Result<Arguments<'a>, Stop> {
        let mut parsed = Arguments { words: Vec::new(), options: Vec::new(), json: false };
        let mut rest = args.iter();
        while let Some(arg) = rest.next() {
            let Some(name) = arg.to_str().and_then(|arg| arg.strip_prefix("--")) else {
                parsed.words.push(arg);
                continue;
            };
            if name.is_empty() {
                parsed.words.extend(rest.by_ref().map(OsString::as_os_str));
                break;
            }
            let (name, value) = match name.split_once('=') {
                Some((name, value)) => (name, Some(OsStr::new(value))),
                None => (name, None),
            };
            if let Some(known) = valued.iter().find(|known| **known == name) {
                let value = value.or_else(|| rest.next().map(OsString::as_os_str));
                let value = value.ok_or_else(|| Stop::Usage(format!("--{name} takes a value")))?;
                parsed.options.push((known, value));
            } else if flags.contains(&name) && value.is_none() {
                parsed.json = true;
            } else {
                return Err(Stop::Usage(format!("there is no option --{name} here")));
            }
        }
        Ok(parsed)
    }

    fn words<const N: usize>(&self) -> Result<[&'a OsStr; N], Stop> {
        let wrong = |_| Stop::Usage(format!("{N} argument(s) are needed, {} are given", self.words.len()));
        self.words.as_slice().try_into().map_err(wrong)
    }

    fn option(&self, name: &str) -> Option<&'a OsStr> {
        self.options.iter().rev().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    fn number(&self, name: &str) -> Result<Option<u64>, Stop> {
        let Some(value) = self.option(name) else { return Ok(None) };
        let number = value.to_str().and_then(|value| value.parse().ok());
        number.map(Some).ok_or_else(|| Stop::Usage(format!("--{name} takes a number")))
    }
}

/// `NAME=VALUE` words as fields. Numbers, and the lists of `run/start`, are known by their names.
fn fields(pairs: &[OsString]) -> Result<Map<String, Value>, Stop> {
    let mut fields = Map::new();
    for pair in pairs {
        let bytes = pair.as_bytes();
        let equals = bytes.iter().position(|byte| *byte == b'=');
        let equals = equals.ok_or_else(|| Stop::Usage(format!("{pair:?} is not NAME=VALUE")))?;
        let name = text(OsStr::from_bytes(&bytes[..equals]))?;
        let value = OsStr::from_bytes(&bytes[equals + 1..]);
        match name {
            "offset" | "limit" | "cpu_us" | "wall_us" => {
                let number = text(value)?.parse::<u64>();
                let number = number.map_err(|cause| Stop::Usage(format!("{name}: {cause}")))?;
                fields.insert(name.to_owned(), number.into());
            }
            "command" | "environment" => match fields.entry(name).or_insert_with(|| Value::Array(Vec::new())) {
                Value::Array(values) => values.push(text(value)?.into()),
                _ => return Err(Stop::Usage(format!("{name} is given twice"))),
            },
            "path" | "to" | "target" => drop(fields.insert(name.to_owned(), escape(value).into())),
            _ => drop(fields.insert(name.to_owned(), text(value)?.into())),
        }
    }
    Ok(fields)
}

fn text(value: &OsStr) -> Result<&str, Stop> {
    value.to_str().ok_or_else(|| Stop::Usage(format!("{value:?} is not UTF-8")))
}

/// A path as the API writes it: a backslash doubled, a byte that is not UTF-8 as `\xNN`.
fn escape(path: &OsStr) -> String {
    let mut text = String::new();
    for chunk in path.as_bytes().utf8_chunks() {
        text.push_str(&chunk.valid().replace('\\', "\\\\"));
        chunk.invalid().iter().for_each(|byte| text.push_str(&format!("\\x{byte:02x}")));
    }
    text
}

/// Text without a control character.
fn printable(text: &str) -> String {
    text.chars().fold(String::new(), |mut shown, c| {
        match c.is_control() {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
        shown
    })
}

fn describe_opinion(told: &Value) -> String {
    let field = |name: &str| printable(told[name].as_str().unwrap_or_default());
    let mut lines =
        format!("{}: {} {} (by {})\n", field("verdict"), field("kind"), field("resource"), field("handler"));
    for name in ["rule", "reason", "hint"] {
        let value = field(name);
        if !value.is_empty() {
            lines.push_str(&format!("  {name}: {value}\n"));
        }
    }
    lines
}

fn describe_self(told: &Value) -> String {
    let word = |value: &Value| printable(value.as_str().unwrap_or("none"));
    let words = |value: &Value| {
        value.as_array().map(|words| words.iter().map(word).collect::<Vec<_>>().join(" ")).unwrap_or_default()
    };
    let mut lines = String::new();
    for name in ["run", "room", "policy", "workspace", "chain"] {
        lines.push_str(&format!("{name:<10} {}\n", word(&told[name])));
    }
    for rule in told["rules"].as_array().into_iter().flatten() {
        let paths = words(&rule["paths"]);
        let network = words(&rule["network"]);
        let on = [paths, network].into_iter().filter(|words| !words.is_empty()).collect::<Vec<_>>().join(" ");
        let paths = if on.is_empty() { on } else { format!(" on {on}") };
        lines.push_str(&format!("{:<10} {}{paths}\n", word(&rule["verdict"]), words(&rule["kinds"])));
    }
    for mount in told["mounts"].as_array().into_iter().flatten() {
        lines.push_str(&format!("{:<10} {} ({})\n", "mount", word(&mount["path"]), word(&mount["access"])));
    }
    for (name, limit) in told["limits"].as_object().into_iter().flatten() {
        let limit = limit.as_u64().map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string());
        lines.push_str(&format!("{:<10} {} {limit}\n", "limit", printable(name)));
    }
    for degraded in told["degraded"].as_array().into_iter().flatten() {
        lines.push_str(&format!("{:<10} {}\n", "without", word(degraded)));
    }
    lines.push_str(&format!("{:<10} {}\n", "more", word(&told["ask"])));
    lines
}

fn describe_budget(told: &Value) -> String {
    let number = |value: &Value| value.as_u64().map_or_else(|| "unlimited".to_owned(), |number| number.to_string());
    let budgets = told.as_object().into_iter().flatten();
    budgets
        .map(|(name, budget)| {
            let (used, limit, left) = (number(&budget["used"]), number(&budget["limit"]), number(&budget["left"]));
            format!("{:<14} {used} used of {limit}, {left} left\n", printable(name))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(args: &[&str]) -> (Status, String) {
        let args: Vec<OsString> = args.iter().map(OsString::from).collect();
        let (mut out, mut talk) = (Vec::new(), Vec::new());
        let status = run(&args, Path::new("/nonexistent/socket"), &mut io::empty(), &mut out, &mut talk);
        assert!(out.is_empty(), "stdout is data");
        (status, String::from_utf8_lossy(&talk).into_owned())
    }

    #[test]
    fn a_wrong_command_line_asks_nobody() {
        let rows: [&[&str]; 12] = [
            &[],
            &["nothing"],
            &["read"],
            &["read", "a", "b"],
            &["read", "a", "--offset"],
            &["read", "a", "--offset", "x"],
            &["read", "a", "--mode", "1"],
            &["mv", "a"],
            &["effect"],
            &["effect", "fs/read", "path"],
            &["effect", "fs/read", "path=a", "limit=-1"],
            &["why"],
        ];
        for args in rows {
            let (status, said) = refused(args);
            assert_eq!(status, Status::Usage, "{args:?}: {said}");
            assert!(said.contains("usage:"), "{args:?}: {said}");
        }
    }

    #[test]
    fn a_missing_supervisor_is_a_failure_that_names_the_socket() {
        let (status, said) = refused(&["budget"]);
        assert_eq!(status, Status::Failed);
        assert!(said.contains("/nonexistent/socket"), "{said}");
    }

    #[test]
    fn help_is_data() {
        let mut out = Vec::new();
        let socket = Path::new("/nonexistent/socket");
        let status = run(&["--help".into()], socket, &mut io::empty(), &mut out, &mut io::sink());
        assert_eq!((status, out.as_slice()), (Status::Done, USAGE.as_bytes()));
    }

    #[test]
    fn a_refusal_has_its_own_status_and_cannot_speak_to_the_terminal() {
        let body = br#"{"error":{"type":"refused","kind":"fs/read","resource":"a\u001b[2J","handler":"admission",
            "reason":"no","hint":"ask"}}"#;
        let Stop::Told { status, said } = told(403, body) else { panic!("is told") };
        assert_eq!(status, Status::Refused);
        assert_eq!(said, "tollgate: refused: fs/read a\\u{1b}[2J: no (by admission)\nhint: ask\n");
    }
}
