// Shows the server's own schema: every route and every field, without anything from elsewhere.

const make = (tag, props = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
};

function type(schema) {
  if (schema.anyOf) return schema.anyOf.map(type).join(" or ");
  if (schema.enum) return schema.enum.join(", ");
  if (schema.type === "array") return `list of ${type(schema.items ?? {})}`;
  const low = schema.minimum ?? schema.minLength;
  const high = schema.maximum ?? schema.maxLength;
  const range = low === undefined ? "" : `, ${low} to ${high}`;
  return `${schema.type ?? "any"}${range}${schema.maxLength ? " characters" : ""}`;
}

function table(properties, required = []) {
  const rows = Object.entries(properties).map(([name, schema]) =>
    make("tr", {},
      make("td", {}, make("code", { textContent: name })),
      make("td", { textContent: type(schema) + (required.includes(name) ? ", required" : "") }),
      make("td", { textContent: schema.description ?? "" }),
    ));
  return make("table", {}, ...rows);
}

function route(path, method, operation) {
  const body = make("div", { className: "body" });
  const schema = operation.requestBody?.content?.["multipart/form-data"]?.schema;
  const named = (operation.parameters ?? []).map((p) => [p.name, { ...p.schema, description: `in the ${p.in}` }]);
  if (named.length) body.append(table(Object.fromEntries(named)));
  if (schema) body.append(make("p", { textContent: "multipart/form-data or application/json:" }), table(schema.properties, schema.required));
  if (!body.children.length) body.append(make("p", { textContent: "No fields." }));
  return make("details", {},
    make("summary", {},
      make("span", { className: "method", textContent: method.toUpperCase() }),
      make("code", { textContent: path }),
      make("span", { className: "what", textContent: operation.summary ?? "" })),
    body);
}

const schema = await fetch("openapi.json").then((answer) => answer.json());
document.getElementById("summary").textContent = `${schema.info.summary} Version ${schema.info.version}.`;
for (const [path, methods] of Object.entries(schema.paths)) {
  for (const [method, operation] of Object.entries(methods)) {
    document.getElementById("routes").append(route(path, method, operation));
  }
}
